// Memory of a card or of the host, and views into it.
#pragma once
#include <cstddef>
#include <memory>

namespace tandem {

// A run of bytes with an owner. What kind of memory it is, its maker knows; `on_host` says whether the CPU may touch it.
class Buffer {
  public:
    // Host memory: page-aligned, zeroed, present, huge pages advised. Throws std::bad_alloc. What was granted cannot fail later.
    static std::shared_ptr<Buffer> allocate(size_t nbytes);
    // The caller keeps the memory mapped for as long as the buffer lives.
    static std::shared_ptr<Buffer> wrap(void* data, size_t nbytes);

    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    virtual ~Buffer() = default;

    std::byte* data() const { return data_; }
    size_t nbytes() const { return nbytes_; }
    virtual bool on_host() const { return true; }

    // Gives memory that lies wholly inside a part back to the system; what was in the part is lost.
    // Throws std::invalid_argument for memory that cannot be given back.
    virtual void discard(size_t offset, size_t nbytes);
    // Takes memory for a part again. Throws std::bad_alloc.
    virtual void touch(size_t offset, size_t nbytes);

  protected:
    Buffer(void* data, size_t nbytes) : data_(static_cast<std::byte*>(data)), nbytes_(nbytes) {}
    // Throws std::invalid_argument.
    void check_part(size_t offset, size_t nbytes) const;

  private:
    std::byte* data_;
    size_t nbytes_;
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
