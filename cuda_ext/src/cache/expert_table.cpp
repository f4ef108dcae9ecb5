#include "cache/expert_table.h"

#include <algorithm>
#include <string>

#include "base/require.h"

namespace tandem {

ExpertTable::ExpertTable(int num_layers, int num_experts, View slots, View uses)
    : num_layers_(num_layers),
      num_experts_(num_experts),
      slots_view_(std::move(slots)),
      uses_view_(std::move(uses)),
      slots_(slots_view_.as<int32_t>()),
      uses_(uses_view_.as<uint32_t>()),
      layers_(std::max(num_layers, 0)) {
    require(num_layers > 0 && num_experts > 0, "a residency table needs layers and experts");
    const size_t entries = static_cast<size_t>(num_layers) * num_experts;
    require(slots_view_.nbytes >= entries * sizeof(int32_t) && uses_view_.nbytes >= entries * sizeof(uint32_t),
            "the memory of a residency table of " + std::to_string(entries) + " entries is too small");
    std::fill_n(slots_, entries, kAbsent);
    std::fill_n(uses_, entries, 0u);
}

void ExpertTable::set_layer(int layer, View blobs, size_t blob_bytes) {
    check(layer, 0);
    require(blob_bytes > 0 && blobs.nbytes == blob_bytes * num_experts_,
            "layer " + std::to_string(layer) + ": " + std::to_string(blobs.nbytes) + " bytes are not " +
                std::to_string(num_experts_) + " blobs of " + std::to_string(blob_bytes));
    layers_[layer] = {std::move(blobs), blob_bytes};
}

int ExpertTable::add_slot(View slot) {
    require(!slot.empty(), "a slot needs memory");
    slot_views_.push_back(std::move(slot));
    return num_slots() - 1;
}

const View& ExpertTable::slot(int slot) const {
    require(slot >= 0 && slot < num_slots(), "there is no slot " + std::to_string(slot) + " of " + std::to_string(num_slots()));
    return slot_views_[slot];
}

View ExpertTable::blob(int layer, int expert) const {
    check(layer, expert);
    const Layer& place = layers_[layer];
    require(!place.blobs.empty(), "layer " + std::to_string(layer) + " has no blobs yet");
    return View::of(place.blobs.buffer, place.blobs.offset + expert * place.blob_bytes, place.blob_bytes);
}

void ExpertTable::set_entry(int layer, int expert, int32_t slot_id) {
    check(layer, expert);
    if (slot_id != kAbsent)
        require(slot(slot_id).nbytes == layers_[layer].blob_bytes,
                "slot " + std::to_string(slot_id) + " has " + std::to_string(slot(slot_id).nbytes) + " bytes, a blob of layer " +
                    std::to_string(layer) + " has " + std::to_string(layers_[layer].blob_bytes));
    const size_t index = static_cast<size_t>(layer) * num_experts_ + expert;
    slots_[index] = slot_id;
    if (published_) __atomic_store_n(published_ + index, slot_id != kAbsent, __ATOMIC_RELAXED);
}

void ExpertTable::change(std::span<const TableEntry> entries) {
    if (linked_) linked_->hold();
    try {
        for (const TableEntry& entry : entries) set_entry(entry.layer, entry.expert, entry.slot);
    } catch (...) {
        if (linked_) linked_->release();
        throw;
    }
    if (linked_) linked_->release();
}

void ExpertTable::set_peer(std::shared_ptr<const ExpertTable> peer) {
    require(peer == nullptr || (peer->num_layers() == num_layers_ && peer->num_experts() == num_experts_ && peer.get() != this),
            "the table of a peer card must be another one for the same experts");
    peer_ = std::move(peer);
}

void ExpertTable::set_published(uint8_t* published) {
    published_ = published;
    if (published == nullptr) return;
    for (size_t index = 0; index < static_cast<size_t>(num_layers_) * num_experts_; index++)
        __atomic_store_n(published + index, slots_[index] != kAbsent, __ATOMIC_RELAXED);
}

int32_t ExpertTable::entry(int layer, int expert) const {
    check(layer, expert);
    return slots_[layer * num_experts_ + expert];
}

void ExpertTable::check(int layer, int expert) const {
    require(layer >= 0 && layer < num_layers_ && expert >= 0 && expert < num_experts_,
            "there is no expert " + std::to_string(expert) + " in layer " + std::to_string(layer) + " of a table of " +
                std::to_string(num_layers_) + " layers of " + std::to_string(num_experts_));
}

}  // namespace tandem
