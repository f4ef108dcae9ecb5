#include "cache/cuda_expert_table.h"

#include <algorithm>

#include "base/require.h"
#include "cards/cuda_check.h"
#include "cuda_ops/experts_window.h"

namespace tandem {

namespace {

View host_table(int num_layers, int num_experts) {
    const size_t nbytes =
        std::max<size_t>(1, static_cast<size_t>(std::max(num_layers, 0)) * std::max(num_experts, 0)) * sizeof(int32_t);
    return View::of(Buffer::allocate(nbytes), 0, nbytes);
}

}  // namespace

CudaExpertTable::CudaExpertTable(int num_layers, int num_experts, View slots, View uses, View landed, cudaStream_t stream)
    : num_layers_(num_layers),
      num_experts_(num_experts),
      stream_(stream),
      slots_(std::move(slots)),
      uses_(std::move(uses)),
      landed_(std::move(landed)),
      totals_(View::of(Buffer::allocate(table_bytes()), 0, table_bytes())),
      mirror_(num_layers, num_experts, host_table(num_layers, num_experts), host_table(num_layers, num_experts)),
      num_resident_(num_layers, 0),
      num_placed_(num_layers, 0) {
    const size_t entries = static_cast<size_t>(num_layers) * num_experts, counts = uses_bytes(num_layers, num_experts);
    require(slots_.nbytes >= entries * sizeof(int32_t) && uses_.nbytes >= counts && landed_.nbytes >= counts,
            "the memory of a residency table of " + std::to_string(entries) + " entries is too small");
    write_all();
}

void CudaExpertTable::set_entry(int layer, int expert, int32_t slot) {
    CudaExpertTable& looked_up = viewer_ ? *viewer_ : *this;
    const bool was_resident = mirror_.entry(layer, expert) != ExpertTable::kAbsent;
    const bool was_placed = looked_up.entry_on_card(layer, expert) != ExpertTable::kAbsent;
    mirror_.set_entry(layer, expert, slot);
    num_resident_[layer] += (slot != ExpertTable::kAbsent) - was_resident;
    looked_up.num_placed_[layer] += (looked_up.entry_on_card(layer, expert) != ExpertTable::kAbsent) - was_placed;
}

bool CudaExpertTable::all_resident() const {
    return std::all_of(num_resident_.begin(), num_resident_.end(), [&](int num) { return num == num_experts_; });
}

bool CudaExpertTable::all_on_cards() const {
    return std::all_of(num_placed_.begin(), num_placed_.end(), [&](int num) { return num == num_experts_; });
}

void CudaExpertTable::set_peer(CudaExpertTable& peer, bool in_reach) {
    require(&peer != this && peer.num_layers_ == num_layers_ && peer.num_experts_ == num_experts_,
            "the tables of a card and its peer do not fit together");
    require(std::all_of(peer.num_resident_.begin(), peer.num_resident_.end(), [](int num) { return num == 0; }),
            "a peer's table must be empty at first");
    peer_ = &peer;
    peer_in_reach_ = in_reach;
    peer.viewer_ = this;
}

const View* CudaExpertTable::slot_in_reach(int layer, int expert) const {
    if (!peer_in_reach_) return nullptr;
    const int32_t slot = peer_->mirror_.entry(layer, expert);
    return slot == ExpertTable::kAbsent ? nullptr : &peer_->mirror_.slot(slot);
}

int32_t CudaExpertTable::entry_on_card(int layer, int expert) const {
    const int32_t slot = mirror_.entry(layer, expert);
    const bool at_peer = slot == ExpertTable::kAbsent && peer_ && peer_->mirror_.entry(layer, expert) != ExpertTable::kAbsent;
    return at_peer ? cuda::kAtPeer : slot;
}

size_t CudaExpertTable::uses_bytes(int num_layers, int num_experts) {
    return (static_cast<size_t>(num_layers) * num_experts * sizeof(uint32_t) + 7) / 8 * 8 + kNumTiers * sizeof(unsigned long long);
}

int CudaExpertTable::add_slot(View slot) {
    const size_t nbytes = slot.nbytes;
    const auto* place = slot.as<const uint8_t>();
    const int number = mirror_.add_slot(std::move(slot));
    slot_bases_.try_emplace(nbytes, place - number * static_cast<int64_t>(nbytes));
    const auto next = next_slots_.find(nbytes);
    require(next == next_slots_.end() || next->second == place, "slots of one size must follow each other on a CUDA card");
    require(slot_base(nbytes) + number * static_cast<int64_t>(nbytes) == place,
            "slots of one size must be added one after the other");
    next_slots_[nbytes] = place + nbytes;
    return number;
}

const uint8_t* CudaExpertTable::slot_base(size_t blob_bytes) const {
    const auto found = slot_bases_.find(blob_bytes);
    return found == slot_bases_.end() ? nullptr : found->second;
}

void CudaExpertTable::collect(cudaStream_t stream) const {
    const size_t nbytes = uses_bytes(num_layers_, num_experts_);
    CUDA_CHECK(cudaMemcpyAsync(landed_.data(), uses_.data(), nbytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemsetAsync(uses_.data(), 0, nbytes, stream));
}

void CudaExpertTable::landed() {
    const auto* uses = landed_.as<const uint32_t>();
    auto* totals = totals_.as<uint32_t>();
    for (size_t i = 0; i < static_cast<size_t>(num_layers_) * num_experts_; i++) totals[i] += uses[i];
    const auto* rows = reinterpret_cast<const unsigned long long*>(landed_.data() + table_bytes());
    for (int tier = 0; tier < kNumTiers; tier++) rows_[tier] += static_cast<int64_t>(rows[tier]);
    rows_[static_cast<int>(Tier::streamed)] -= fetched_rows_;
    rows_[static_cast<int>(Tier::fetched)] += fetched_rows_;
    fetched_rows_ = 0;
}

void CudaExpertTable::note_copied(size_t nbytes, int num_rows, bool from_peer) {
    (from_peer ? bytes_from_peer_ : bytes_from_arena_) += static_cast<int64_t>(nbytes);
    if (from_peer) fetched_rows_ += num_rows;
}

void CudaExpertTable::write_all() const {
    std::vector<int32_t> entries;
    entries.reserve(static_cast<size_t>(num_layers_) * num_experts_);
    for (int layer = 0; layer < num_layers_; layer++)
        for (int expert = 0; expert < num_experts_; expert++) entries.push_back(entry_on_card(layer, expert));
    CUDA_CHECK(cudaMemcpy(slots_on_card(0), entries.data(), entries.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
}

}  // namespace tandem
