// The residency table of one card: which experts lie in its slots, and where every expert's bytes are.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "base/buffer.h"

namespace tandem {

// Thread rule: changed only on the card's command thread (that is, between windows); `find` and `count` are called by the
// running program; the tier counters may be read by anyone.
class ExpertTable {
  public:
    static constexpr int32_t kAbsent = -1;

    struct Found {
        const uint8_t* blob;
        bool resident;
    };

    // `slots` and `uses`: [layers, experts] int32 and uint32 in the card's memory; filled with kAbsent and 0 here.
    ExpertTable(int num_layers, int num_experts, View slots, View uses);

    int num_layers() const { return num_layers_; }
    int num_experts() const { return num_experts_; }
    int num_slots() const { return static_cast<int>(slot_views_.size()); }
    const View& uses() const { return uses_view_; }

    // Where a layer's blobs lie in the arena, one after the other.
    void set_layer(int layer, View blobs, size_t blob_bytes);
    // A place for one blob; returns its number. Slots of one blob size form a class.
    int add_slot(View slot);

    const View& slot(int slot) const;
    // The blob in the arena.
    View blob(int layer, int expert) const;

    // `slot` or kAbsent. The bytes must have been copied before. Throws std::invalid_argument for sizes that do not match.
    void set_entry(int layer, int expert, int32_t slot);
    int32_t entry(int layer, int expert) const;

    Found find(int layer, int expert) const {
        const int32_t slot = slots_[layer * num_experts_ + expert];
        if (slot != kAbsent) return {slot_views_[slot].as<const uint8_t>(), true};
        return {layers_[layer].blobs.as<const uint8_t>() + expert * layers_[layer].blob_bytes, false};
    }

    // Notes that `rows` rows use an expert.
    void count(int layer, int expert, bool resident, int rows) {
        uses_[layer * num_experts_ + expert] += rows;
        (resident ? own_rows_ : host_rows_).fetch_add(rows, std::memory_order_relaxed);
    }

    int64_t own_rows() const { return own_rows_.load(std::memory_order_relaxed); }
    int64_t host_rows() const { return host_rows_.load(std::memory_order_relaxed); }

  private:
    struct Layer {
        View blobs;
        size_t blob_bytes = 0;
    };

    void check(int layer, int expert) const;

    int num_layers_;
    int num_experts_;
    View slots_view_;
    View uses_view_;
    int32_t* slots_;
    uint32_t* uses_;
    std::vector<Layer> layers_;
    std::vector<View> slot_views_;
    std::atomic<int64_t> own_rows_{0};
    std::atomic<int64_t> host_rows_{0};
};

}  // namespace tandem
