// The residency table of one card: which experts lie in its slots, and where every expert's bytes are.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "cache/tier.h"
#include "ops/linked_rows.h"

namespace tandem {

struct TableEntry {
    int layer;
    int expert;
    int32_t slot;
};

// Thread rule: changed only on the card's command thread (that is, between windows); `find` and `count` are called by the
// running program; the tier counters may be read by anyone.
class ExpertTable {
  public:
    static constexpr int32_t kAbsent = -1;

    struct Found {
        const uint8_t* blob;
        Tier tier;
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
    // All blobs of a layer there.
    const View& layer_blobs(int layer) const {
        check(layer, 0);
        return layers_[layer].blobs;
    }

    // `slot` or kAbsent. The bytes must have been copied before. Throws std::invalid_argument for sizes that do not match.
    void set_entry(int layer, int expert, int32_t slot);
    int32_t entry(int layer, int expert) const;
    // Several entries, while no linked rows are being computed from the slots.
    void change(std::span<const TableEntry> entries);

    // The slots of a second card, looked up where this card has none. Before the first run.
    void set_peer(std::shared_ptr<const ExpertTable> peer);

    // Whom linked experts are asked of, or null. Before the first run.
    void set_linked(std::shared_ptr<LinkedRows> linked) { linked_ = std::move(linked); }
    LinkedRows* linked() const { return linked_.get(); }
    // [layers, experts] bytes in which this table's owner says what it holds, 1 or 0; kept up to date from here on.
    void set_published(uint8_t* published);
    // What the partner's card holds, or null while it computes nothing for others. Between two runs.
    void set_offered(const uint8_t* offered) { offered_ = offered; }

    Found find(int layer, int expert) const {
        const size_t index = static_cast<size_t>(layer) * num_experts_ + expert;
        if (slots_[index] != kAbsent) return {slot_views_[slots_[index]].as<const uint8_t>(), Tier::own};
        if (peer_ && peer_->slots_[index] != kAbsent)
            return {peer_->slot_views_[peer_->slots_[index]].as<const uint8_t>(), Tier::peer};
        return {layers_[layer].blobs.as<const uint8_t>() + expert * layers_[layer].blob_bytes,
                offered_ && __atomic_load_n(offered_ + index, __ATOMIC_RELAXED) ? Tier::linked : Tier::host};
    }

    // In this card's slots, or in the arena.
    Found find_own(int layer, int expert) const {
        const size_t index = static_cast<size_t>(layer) * num_experts_ + expert;
        if (slots_[index] != kAbsent) return {slot_views_[slots_[index]].as<const uint8_t>(), Tier::own};
        return {layers_[layer].blobs.as<const uint8_t>() + expert * layers_[layer].blob_bytes, Tier::host};
    }

    // Notes that `rows` rows use an expert.
    void count(int layer, int expert, Tier tier, int rows) {
        uses_[layer * num_experts_ + expert] += rows;
        rows_[static_cast<int>(tier)].fetch_add(rows, std::memory_order_relaxed);
    }

    int64_t rows(Tier tier) const { return rows_[static_cast<int>(tier)].load(std::memory_order_relaxed); }

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
    std::array<std::atomic<int64_t>, kNumTiers> rows_{};
    std::shared_ptr<const ExpertTable> peer_;
    std::shared_ptr<LinkedRows> linked_;
    uint8_t* published_ = nullptr;
    const uint8_t* offered_ = nullptr;
};

}  // namespace tandem
