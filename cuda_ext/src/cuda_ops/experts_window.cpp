#include "cuda_ops/experts_window.h"

#include <algorithm>
#include <string>

#include "base/require.h"
#include "cuda_ops/window_state.h"
#include "ops/activations.h"

namespace tandem::cuda {

namespace {

constexpr size_t kMarginBytes = 32;  // of a matrix: copies begin and end at multiples of 16, dot products read 3 bytes beyond

}  // namespace

StagedRows staged_rows(const BlobPart& part) {
    const bool is_aligned = part.row_bytes % kStreamUnit == 0 && part.offset % kStreamUnit == 0;
    return {part.row_bytes, is_aligned ? kMarginBytes : 2 * kStreamUnit};
}

StagedRows operator+(const StagedRows& a, const StagedRows& b) {
    return {a.nbytes + b.nbytes, a.margin_bytes + b.margin_bytes};
}

RingPlan plan_rings(size_t available, const WantedRings& wanted, const StagedRows& staged) {
    const auto rings = [&](int warps, int rows) {
        const size_t stage = staged.stage_bytes(rows), per_warp = available / warps;
        const int stages = static_cast<int>(std::min<size_t>(kMaxStages, stages_fitting(per_warp, stage)));
        return RingPlan{warps, stages, rows, static_cast<uint32_t>(stage), static_cast<uint32_t>(ring_bytes(warps, stages, stage))};
    };
    for (int rows = wanted.stage_rows; rows >= 1; rows--)
        if (const RingPlan plan = rings(wanted.num_warps, rows); plan.num_stages >= wanted.num_stages) return plan;
    for (int warps = wanted.num_warps; warps >= 1; warps /= 2)
        if (const RingPlan plan = rings(warps, 1); plan.num_stages >= 1) return plan;
    return {};
}

size_t input_row_bytes(quant::Type type, int64_t columns) {
    if (quant::type_wants_values(type)) return columns * sizeof(float);
    return groups_of(columns) * sizeof(quant::ActGroup);
}

void check_routing(int num_rows, const Choice& choice) {
    require(num_rows >= 1 && num_rows <= kMaxWindowRows,
            "a window of " + std::to_string(num_rows) + " rows; 1 to " + std::to_string(kMaxWindowRows) + " are possible");
    require(choice.num_experts >= 1 && choice.num_experts <= kMaxRoutedExperts && choice.top_k >= 1 && choice.top_k <= kMaxTopK &&
                choice.top_k <= choice.num_experts,
            "cannot choose " + std::to_string(choice.top_k) + " of " + std::to_string(choice.num_experts) + " experts; up to " +
                std::to_string(kMaxTopK) + " of " + std::to_string(kMaxRoutedExperts) + " are possible");
}

void check_part(const BlobPart& part, const ExpertPlaces& places) {
    require(part.offset % 16 == 0 && part.offset + part.rows * part.row_bytes < (size_t{1} << 32),
            "a matrix at " + std::to_string(part.offset) +
                " of a blob; blobs have less than 4 GiB, their matrices begin at multiples of 16");
    require(part.offset + part.rows * part.row_bytes <= places.blob_bytes,
            "a matrix of " + std::to_string(part.rows * part.row_bytes) + " bytes at " + std::to_string(part.offset) +
                " does not fit a blob of " + std::to_string(places.blob_bytes));
    require(part.rows % 32 == 0 && part.columns % 32 == 0, "experts of " + std::to_string(part.rows) + " rows of " +
                                                               std::to_string(part.columns) +
                                                               " values; multiples of 32 are possible");
}

}  // namespace tandem::cuda
