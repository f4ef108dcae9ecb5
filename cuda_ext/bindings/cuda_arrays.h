// Arrays on a card for tests: copies of numpy's, with guard space around them that must stay as it is.
#pragma once
#include <cuda_runtime.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/check.h"

namespace tandem::bindings {

constexpr size_t kGuardBytes = 256;
constexpr uint8_t kSentinel = 0xa5;  // of guard space and of outputs that nobody wrote: a float of -2.9e-16

class CardArray {
  public:
    explicit CardArray(size_t nbytes) : nbytes_(nbytes), host_(nbytes + 2 * kGuardBytes, kSentinel) {
        CUDA_CHECK(cudaMalloc(&base_, host_.size()));
        CUDA_CHECK(cudaMemcpy(base_, host_.data(), host_.size(), cudaMemcpyHostToDevice));
    }
    CardArray(const void* data, size_t nbytes) : CardArray(nbytes) {
        if (nbytes) CUDA_CHECK(cudaMemcpy(this->data(), data, nbytes, cudaMemcpyHostToDevice));
    }
    ~CardArray() { cudaFree(base_); }
    CardArray(const CardArray&) = delete;
    CardArray& operator=(const CardArray&) = delete;

    void* data() { return static_cast<uint8_t*>(base_) + kGuardBytes; }
    template <class T>
    T* as() {
        return static_cast<T*>(data());
    }
    size_t nbytes() const { return nbytes_; }

    // What is there now. Throws std::runtime_error where the guard space was written to.
    std::vector<uint8_t> read() {
        CUDA_CHECK(cudaMemcpy(host_.data(), base_, host_.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < kGuardBytes; i++)
            if (host_[i] != kSentinel || host_[host_.size() - 1 - i] != kSentinel)
                throw std::runtime_error("something wrote outside of an array of " + std::to_string(nbytes_) + " bytes");
        return {host_.begin() + kGuardBytes, host_.end() - kGuardBytes};
    }
    template <class T>
    nanobind::ndarray<nanobind::numpy, T> numpy(std::initializer_list<size_t> shape) {
        const std::vector<uint8_t> bytes = read();
        auto* kept = new std::vector<T>(bytes.size() / sizeof(T));
        std::memcpy(kept->data(), bytes.data(), kept->size() * sizeof(T));
        nanobind::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
        return {kept->data(), shape, owner};
    }

  private:
    size_t nbytes_;
    std::vector<uint8_t> host_;
    void* base_ = nullptr;
};

}  // namespace tandem::bindings
