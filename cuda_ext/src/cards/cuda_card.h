// A GPU: its memory counted by use, a stream that computes and one that copies.
#pragma once
#include <cuda_runtime.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache/cuda_expert_table.h"
#include "cards/cuda_memory.h"
#include "cards/host_card.h"
#include "cuda_ops/experts_window.h"

namespace tandem {

// Rows of bytes on a card and in the host, each side with its own distance from one row to the next.
struct RowCopy {
    size_t num_rows;
    size_t row_bytes;
    size_t card_pitch;
    size_t host_pitch;
};

// How many devices this process can use. Throws CudaError.
int cuda_device_count();

// Makes a device the calling thread's current one for as long as it lives; from then on if the thread's own has no context yet.
class DeviceScope {
  public:
    explicit DeviceScope(int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int before_ = 0;
    bool is_restored_ = false;
};

// Confined to one thread, the engine loop. An engine's own card is that thread's current device; calls of another one make it
// current while they run. Tickets of `update` and of `copy` count separately; 0 is always done.
class CudaCard {
  public:
    // Throws CudaError for a device that is not there or cannot run this build. `pool` and `isa`: of the host tier.
    CudaCard(int device, std::shared_ptr<Pool> pool, quant::Isa isa);
    ~CudaCard();
    CudaCard(const CudaCard&) = delete;
    CudaCard& operator=(const CudaCard&) = delete;

    int device() const { return device_; }
    // Makes it the calling thread's own card.
    void make_current() const;
    const std::string& name() const { return name_; }
    Pool& pool() const { return *pool_; }
    const std::shared_ptr<Pool>& shared_pool() const { return pool_; }
    quant::Isa isa() const { return isa_; }
    const cuda::CardShape& shape() const { return shape_; }
    // Before the first window.
    void set_window_blocks(int blocks) { shape_.window_blocks = blocks; }
    int serving_priority() const { return serving_priority_; }
    cudaStream_t compute_stream() const { return compute_; }
    cudaStream_t copy_stream() const { return copy_; }

    // Zeroed memory on the card, counted under `use`. Throws std::bad_alloc.
    std::shared_ptr<Buffer> allocate(const std::string& use, size_t nbytes);
    // The same in segments that can be given back (Buffer::discard) and taken again. Not `present`: addresses only, at first.
    std::shared_ptr<Buffer> allocate_segments(const std::string& use, size_t nbytes, bool present);
    std::map<std::string, size_t> bytes_by_use() const;
    // What is free on the device now, whoever holds the rest.
    size_t free_bytes() const;

    // Whether kernels of each card may read and write the other's memory from here on: what is allocated later, in segments too.
    bool reach(CudaCard& other);

    // Pins the arena as far as the system allows; returns how many bytes are pinned.
    size_t pin(const View& arena);
    // The arena that another card of this process has pinned.
    void share_pinned(const CudaCard& other) { pinned_ = other.pinned_; }
    // Before the arena's memory goes. Nothing may be running.
    void unpin();
    // Whether kernels may read the part in place.
    bool is_pinned(const View& part) const;

    // Host bytes to the card. Blocks.
    void write(const View& to, const void* data, size_t nbytes, size_t offset = 0);
    // Rows of bytes from or to the card, behind all earlier work of the compute stream. Both block.
    void read_rows(void* to, const View& from, const RowCopy& rows);
    void write_rows(const View& to, const void* from, const RowCopy& rows);

    // Changes entries of a residency table behind all earlier work of the compute stream.
    Ticket update(const std::shared_ptr<CudaExpertTable>& table, const std::vector<TableEntry>& entries);
    void wait(Ticket ticket);

    // How much of a window's misses kernels read from the arena in place, 0..1; the host tier computes the rest.
    float streamed_ratio() const { return streamed_ratio_; }
    void set_streamed_ratio(float ratio);

    // Enqueues the copy of a blob in host memory on the copy stream.
    void enqueue_copy(std::byte* to, const View& from);
    // Copies a blob on the copy stream, not before update `after` has been passed. Throws std::invalid_argument if sizes differ.
    Ticket copy(const View& to, const View& from, Ticket after);
    bool copied(Ticket ticket);
    void wait_copied(Ticket ticket);

  private:
    // Events of the newest tickets of a stream; older ones are done.
    class Tickets {
      public:
        ~Tickets();
        Ticket record(cudaStream_t stream);
        // Null: passed long ago.
        cudaEvent_t event(Ticket ticket);

      private:
        static constexpr size_t kKept = 256;
        std::deque<std::pair<Ticket, cudaEvent_t>> events_;
        Ticket last_ = 0;
    };

    void write_entries(const CudaExpertTable& table, const std::vector<TableEntry>& entries);
    void note(const std::string& use, const std::shared_ptr<Buffer>& buffer);

    int device_;
    cuda::CardShape shape_{};
    std::string name_;
    std::shared_ptr<Pool> pool_;
    quant::Isa isa_;
    int serving_priority_ = 0;  // of streams that answer somebody who waits
    cudaStream_t compute_ = nullptr;
    cudaStream_t copy_ = nullptr;
    Tickets updates_;
    Tickets copies_;
    std::vector<std::pair<std::string, std::weak_ptr<Buffer>>> allocated_;
    float streamed_ratio_ = 0.4f;
    View arena_;
    std::shared_ptr<PinnedRange> pinned_;
    std::vector<int> sharers_;         // devices that may use its memory too
    std::shared_ptr<Buffer> entries_;  // mapped: values of table entries on their way
    size_t next_entry_ = 0;
};

}  // namespace tandem
