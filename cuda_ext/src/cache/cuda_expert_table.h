// The residency table of a CUDA card: the table itself and the use counters lie on the card, a mirror in the host.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <functional>
#include <map>
#include <memory>

#include "cache/expert_table.h"
#include "cache/tier.h"

namespace tandem {

// Confined to the engine loop. Changes of entries reach the card through CudaCard::update.
class CudaExpertTable {
  public:
    // `slots`: [layers, experts] int32 on the card. `uses`: [layers, experts] uint32 and kNumTiers uint64 behind it, on the card.
    // `landed`: mapped host memory of the size of `uses`, where every run leaves its counts. `stream`: of the table's card.
    CudaExpertTable(int num_layers, int num_experts, View slots, View uses, View landed, cudaStream_t stream);

    static size_t uses_bytes(int num_layers, int num_experts);

    ExpertTable& mirror() { return mirror_; }
    const ExpertTable& mirror() const { return mirror_; }

    // As ExpertTable::add_slot. Slots of one size must follow each other in memory, because the card computes their addresses.
    int add_slot(View slot);
    // The slots of blobs of this size lie at base + slot number * blob_bytes; the base itself may lie before all memory.
    const uint8_t* slot_base(size_t blob_bytes) const;

    // Changes an entry of the mirror; the card's own is the caller's to change.
    void set_entry(int layer, int expert, int32_t slot);
    int num_resident(int layer) const { return num_resident_[layer]; }
    bool all_resident() const;
    // Whether a window finds every expert on this card or on the second one.
    bool all_on_cards() const;

    // The table of a second card, looked up where this one has nothing. Before the first run; both tables live equally long.
    // `in_reach`: whether this card may copy from the other's slots.
    void set_peer(CudaExpertTable& peer, bool in_reach);
    // The second card's slot that an expert may be copied from, or null.
    const View* slot_in_reach(int layer, int expert) const;
    // Whose peer this table is, or null.
    CudaExpertTable* viewer() const { return viewer_; }
    // What this card's own entry should read: a slot, kAtPeer or kAbsent.
    int32_t entry_on_card(int layer, int expert) const;
    cudaStream_t stream() const { return stream_; }

    // `settle` returns when nobody reads any more what was taken out of the table before it was called. Null: nobody but the runs
    // of this engine ever reads.
    void set_settle(std::function<void()> settle) { settle_ = std::move(settle); }
    void settle() const {
        if (settle_) settle_();
    }

    int32_t* slots_on_card(int layer) const { return slots_.as<int32_t>() + layer * num_experts_; }
    uint32_t* uses_on_card(int layer) const { return uses_.as<uint32_t>() + layer * num_experts_; }
    unsigned long long* tier_rows_on_card() const { return reinterpret_cast<unsigned long long*>(uses_.data() + table_bytes()); }

    // Enqueues: the counts since the last collection go to the host, those on the card begin at zero again.
    void collect(cudaStream_t stream) const;
    // Adds what the last collection brought to the totals. The stream of `collect` must have passed it.
    void landed();
    const View& landing() const { return landed_; }
    // What runs used, [layers, experts] uint32, until the reader sets it to zero.
    const View& uses() const { return totals_; }
    int64_t rows(Tier tier) const { return rows_[static_cast<int>(tier)]; }

    // What a prompt's chunk copied to the card for an expert that `num_rows` rows use, from the arena or from the second card. The
    // router counts both as streamed.
    void note_copied(size_t nbytes, int num_rows, bool from_peer);
    int64_t bytes_from_arena() const { return bytes_from_arena_; }
    int64_t bytes_from_peer() const { return bytes_from_peer_; }

    // Entries of the mirror, all of them, to the card. Blocks.
    void write_all() const;

  private:
    size_t table_bytes() const { return (static_cast<size_t>(num_layers_) * num_experts_ * sizeof(uint32_t) + 7) / 8 * 8; }

    int num_layers_;
    int num_experts_;
    cudaStream_t stream_;
    CudaExpertTable* peer_ = nullptr;
    CudaExpertTable* viewer_ = nullptr;
    bool peer_in_reach_ = false;
    std::function<void()> settle_;
    View slots_;
    View uses_;
    View landed_;
    View totals_;
    ExpertTable mirror_;
    std::vector<int> num_resident_;                // by layer
    std::vector<int> num_placed_;                  // by layer, here or on the second card
    std::map<size_t, const uint8_t*> slot_bases_;  // by blob size
    std::map<size_t, const uint8_t*> next_slots_;  // where the next slot of that size must lie
    std::array<int64_t, kNumTiers> rows_{};
    int64_t fetched_rows_ = 0;  // among the streamed ones that the next collection brings
    int64_t bytes_from_arena_ = 0;
    int64_t bytes_from_peer_ = 0;
};

}  // namespace tandem
