// Memory of a host card, and views into it.
#pragma once
#include <cstddef>
#include <memory>

namespace tandem {

// A run of bytes: owned (page-aligned, zeroed, present in memory, huge pages advised) or somebody else's.
class Buffer {
  public:
    // Throws std::bad_alloc. Every page has been touched: what was granted cannot fail later.
    static std::shared_ptr<Buffer> allocate(size_t nbytes);
    // The caller keeps the memory mapped for as long as the buffer lives.
    static std::shared_ptr<Buffer> wrap(void* data, size_t nbytes);

    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer();

    std::byte* data() const { return data_; }
    size_t nbytes() const { return nbytes_; }

    // Gives the pages that lie wholly inside a part back to the system; what was in the part is lost. Owned memory only.
    void discard(size_t offset, size_t nbytes);
    // Makes every page of a part present.
    void touch(size_t offset, size_t nbytes);

  private:
    Buffer(std::byte* data, size_t nbytes, bool owned) : data_(data), nbytes_(nbytes), owned_(owned) {}

    std::byte* data_;
    size_t nbytes_;
    bool owned_;
};

// A part of a buffer; keeps the buffer alive. Empty views stand for optional inputs that are absent.
struct View {
    std::shared_ptr<Buffer> buffer;
    size_t offset = 0;
    size_t nbytes = 0;

    // Throws std::invalid_argument if the part does not lie inside the buffer.
    static View of(std::shared_ptr<Buffer> buffer, size_t offset, size_t nbytes);

    bool empty() const { return buffer == nullptr; }
    std::byte* data() const { return empty() ? nullptr : buffer->data() + offset; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data());
    }
};

}  // namespace tandem
