#include "base/buffer.h"

#include <sys/mman.h>

#include <new>

#include "base/require.h"

namespace tandem {

namespace {

constexpr size_t kPage = 4096;

class OwnBuffer final : public Buffer {
  public:
    OwnBuffer(void* data, size_t nbytes) : Buffer(data, nbytes) {}
    ~OwnBuffer() override { munmap(data(), nbytes()); }

    void discard(size_t offset, size_t nbytes) override {
        check_part(offset, nbytes);
        const size_t first = (offset + kPage - 1) / kPage * kPage, end = (offset + nbytes) / kPage * kPage;
        if (first < end) madvise(data() + first, end - first, MADV_DONTNEED);
    }
    void touch(size_t offset, size_t nbytes) override {
        check_part(offset, nbytes);
        for (size_t at = offset; at < offset + nbytes; at += kPage) {
            auto* byte = static_cast<volatile std::byte*>(data() + at);
            *byte = *byte;
        }
    }
};

class WrappedBuffer final : public Buffer {
  public:
    WrappedBuffer(void* data, size_t nbytes) : Buffer(data, nbytes) {}
};

}  // namespace

std::shared_ptr<Buffer> Buffer::allocate(size_t nbytes) {
    require(nbytes > 0, "a buffer of 0 bytes was asked for");
    void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    auto buffer = std::make_shared<OwnBuffer>(data, nbytes);
    madvise(data, nbytes, MADV_HUGEPAGE);  // advice: without it everything works, a little slower
    buffer->touch(0, nbytes);
    return buffer;
}

std::shared_ptr<Buffer> Buffer::wrap(void* data, size_t nbytes) {
    require(data != nullptr && nbytes > 0, "an empty buffer was given");
    return std::make_shared<WrappedBuffer>(data, nbytes);
}

void Buffer::discard(size_t, size_t) {
    require(false, "only memory of a card's own can be given back");
}

void Buffer::touch(size_t, size_t) {
    require(false, "only memory of a card's own can be taken");
}

void Buffer::check_part(size_t offset, size_t nbytes) const {
    require(offset <= nbytes_ && nbytes <= nbytes_ - offset, "a part of " + std::to_string(nbytes) + " bytes at " +
                                                                 std::to_string(offset) + " does not fit a buffer of " +
                                                                 std::to_string(nbytes_));
}

View View::of(std::shared_ptr<Buffer> buffer, size_t offset, size_t nbytes) {
    require(buffer != nullptr, "a view needs a buffer");
    require(offset <= buffer->nbytes() && nbytes <= buffer->nbytes() - offset,
            "a view of " + std::to_string(nbytes) + " bytes at " + std::to_string(offset) + " does not fit a buffer of " +
                std::to_string(buffer->nbytes()));
    return View{std::move(buffer), offset, nbytes};
}

}  // namespace tandem
