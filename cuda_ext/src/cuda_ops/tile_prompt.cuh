// Products of a tile: up to 128 input rows by 128 weight rows, all their values, by one block of 128 threads.
//
// Weight rows are two sides of 64: the same output columns of gate and up, or neighbouring ones of one matrix. Per step of 32
// values, with everything in shared memory:
//
//     raw bytes     [2 sides][2 spans][64 rows] of one or several steps, as in the file, copied in the background; then a code book
//     weights       [2][128 rows][32] halves: thread t decodes row t of the next step while this one is multiplied
//     inputs        [3 stages][128 rows][32] halves, copied in the background
//
// A row of 32 halves is four chunks of 16 bytes; chunk c of row r lies in place c ^ (r / 2 % 4), so that eight neighbouring rows
// hit all banks. Warp w has the input rows 32 f + 16 (w % 2) + 0..15, f = 0..3, and of each side the weight rows
// 32 (w / 2) + 0..31. A tile of fewer rows leaves out whole f.
//
// Order: one mma of 16 values after the other, values rising, whatever the tile's size and place: a row's bits depend on
// nothing but the row and the weights.
#pragma once
#include "cuda_ops/half_rows.h"
#include "cuda_ops/tile_prompt.h"
#include "device/primitives.cuh"
#include "quant/half_decode.cuh"
#include "quant/row_device.cuh"

namespace tandem::cuda {

constexpr int kRowGroups = 4;      // f
constexpr int kSideFragments = 4;  // eight weight rows each, of one side of a warp
constexpr int kStepBytes = kTileStep * 2;
constexpr int kChunks = kStepBytes / 16;
constexpr int kStageBytes = kTileRows * kStepBytes;
constexpr int kWeightsBytes = kTileColumns * kStepBytes;

// products[f][j]: fragment f of the warp's input rows by fragment j of its weight rows, side j / 4.
using TileProducts = float[kRowGroups][2 * kSideFragments][4];

// Weight rows of one side: `data` is the first of them. Of `num_rows` < 64 the last one is repeated; its products are no results.
struct TileSide {
    const uint8_t* data;
    int num_rows;  // at least 1
};

struct TileInputs {
    int width;                         // values of a row, a multiple of 32
    int num_rows;                      // of the tile, 1..128
    const uint16_t* next[kRowGroups];  // the halves that this thread copies next, of the rows that input_row names
};

// The row of the tile whose values a thread copies, repeating the last one beyond the end.
__device__ __forceinline__ int input_row(int f, int num_rows, int thread) {
    return min(32 * f + thread / kChunks, num_rows - 1);
}
// Where it copies them from, of row `row` of the problem's inputs.
__device__ __forceinline__ const uint16_t* input_halves(const HalfRows& x, int row, int thread) {
    return x.values + static_cast<size_t>(row) * x.width + thread % kChunks * 8;
}

__device__ __forceinline__ int chunk_place(int row, int chunk) {
    return row * kStepBytes + ((chunk ^ (row >> 1 & 3)) << 4);
}

// The block's shared memory and this thread's part of the work. `shape` and `side` are those of the thread's side.
class TileWorker {
  public:
    // `others_bytes`: shared memory of the sides before this one.
    __device__ __forceinline__ TileWorker(const TileInputs& inputs, const SideShape& shape, const TileSide& side,
                                          uint32_t others_bytes, int thread)
        : from_(inputs), shape_(shape), data_(side.data), last_row_(side.num_rows - 1), thread_(thread), lane_(thread % 32) {
        inputs_ = device::dynamic_shared();
        weights_ = inputs_ + kTileStages * kStageBytes;
        raw_ = weights_ + 2 * kWeightsBytes + others_bytes;
        stage_ = inputs_ + chunk_place(thread / kChunks, thread % kChunks);
        raw_row_ = raw_ + thread % kSideColumns * shape.pitch;
        low_bits_ = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(weight_row(thread % kSideColumns)) & 15);
    }

    // All threads call. products += sums over all values.
    __device__ __forceinline__ void multiply(TileProducts& products) {
        if (shape_.table_bytes) quant::load_table(shape_.type, table(), thread_ % kSideColumns, kSideColumns);
        start_span();
        start_inputs();
        device::copy_async_commit();
        device::copy_async_commit();  // from here on everything is copied two steps before it is needed
        unsigned char *decoded = weights_, *spare = weights_ + kWeightsBytes;
        const unsigned char* inputs = inputs_ + (kTileStages - 1) * kStageBytes;
        for (int at = -kTileStep; at < from_.width; at += kTileStep) {  // the step at `at` is multiplied, the next one decoded
            if (shape_.span_values == kTileStep)
                device::copy_async_wait<0>();  // but for a span of one step, which was copied only just now
            else
                device::copy_async_wait<1>();
            __syncthreads();
            if (column_ == 0) start_span();  // a span begins: the one before it has been read by all
            start_inputs();
            device::copy_async_commit();
            if (at + kTileStep < from_.width) decode(spare);
            if (at >= 0) multiply_step(inputs, decoded, products);
            inputs = inputs == inputs_ + (kTileStages - 1) * kStageBytes ? inputs_ : inputs + kStageBytes;
            unsigned char* const last = decoded;
            decoded = spare;
            spare = last;
        }
    }

    // write(row, f, half): this thread has products of the tile's row `row`, in products[f][j][2 * half] and the one after it for
    // every j; they belong to columns side_column(j) of side j / 4 and its right neighbour.
    template <class Write>
    __device__ __forceinline__ void each_row(Write write) const {
#pragma unroll
        for (int f = 0; f < kRowGroups; f++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 32 * f + 16 * (thread_ / 32 % 2) + 8 * half + lane_ / 4;
                if (row < from_.num_rows) write(row, f, half);
            }
    }
    __device__ __forceinline__ int side_column(int j) const {
        return 32 * (thread_ / 64) + 8 * (j % kSideFragments) + 2 * (lane_ % 4);
    }

  private:
    __device__ __forceinline__ const uint8_t* weight_row(int row) const { return data_ + min(row, last_row_) * shape_.row_bytes; }

    __device__ __forceinline__ unsigned char* table() const { return raw_ + 2 * kSideColumns * shape_.pitch; }

    // The 64 threads of a side copy its next span, four neighbouring ones a row.
    __device__ __forceinline__ void start_span() {
        const int rest = static_cast<int>(shape_.row_bytes) - copied_bytes_;
        if (rest <= 0) return;
        unsigned char* raw = raw_ + copied_half_ * kSideColumns * shape_.pitch;
        for (int row = thread_ % kSideColumns / 4; row < kSideColumns; row += kSideColumns / 4) {
            const auto from = device::aligned_span(weight_row(row) + copied_bytes_, min(rest, shape_.span_bytes));
            for (uint32_t at = thread_ % 4 * 16; at < from.nbytes; at += 64)
                device::copy_async16(raw + row * shape_.pitch + at, static_cast<const uint8_t*>(from.start) + at);
        }
        copied_bytes_ += shape_.span_bytes;
        copied_half_ ^= 1;
    }

    // The next step.
    __device__ __forceinline__ void start_inputs() {
        if (copied_ >= from_.width) return;
        copied_ += kTileStep;
#pragma unroll
        for (int f = 0; f < kRowGroups; f++) {
            if (32 * f < from_.num_rows) device::copy_async16(stage_ + f * 32 * kStepBytes, from_.next[f]);
            from_.next[f] += kTileStep;
        }
        stage_ += kStageBytes;
        if (stage_ >= weights_) stage_ -= kTileStages * kStageBytes;
    }

    // This thread's row of the next step.
    __device__ __forceinline__ void decode(unsigned char* weights) {
        const quant::HalfBlock block = quant::half_weights(shape_.type, raw_row_ + low_bits_, column_, table());
#pragma unroll
        for (int c = 0; c < kChunks; c++) *reinterpret_cast<uint4*>(weights + chunk_place(thread_, c)) = block.chunk[c];
        column_ += kTileStep;
        if (column_ < static_cast<uint32_t>(shape_.span_values)) return;
        column_ = 0;
        low_bits_ = (low_bits_ + shape_.span_bytes) & 15;
        const uint32_t half = kSideColumns * shape_.pitch;
        raw_row_ = raw_row_ >= raw_ + half ? raw_row_ - half : raw_row_ + half;
    }

    __device__ __forceinline__ void multiply_step(const unsigned char* inputs, const unsigned char* weights,
                                                  TileProducts& products) {
        const int warp_row = 16 * (thread_ / 32 % 2), num_groups = (from_.num_rows - warp_row + 31) / 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {  // sixteen values each
            uint32_t a[kRowGroups][4], b[2 * kSideFragments][2];
            load_weights(weights, half, b);
#pragma unroll
            for (int f = 0; f < kRowGroups; f++)
                device::ldmatrix_x4(a[f], inputs + chunk_place(32 * f + warp_row + lane_ % 16, 2 * half + lane_ / 16));
#pragma unroll
            for (int f = 0; f < kRowGroups; f++) {
                if (f >= num_groups) break;
#pragma unroll
                for (int j = 0; j < 2 * kSideFragments; j++) device::mma_f16(products[f][j], a[f], b[j]);
            }
        }
    }

    // A load brings two fragments: matrices 0, 1 are values 0..7, 8..15 of the first, matrices 2, 3 of the second.
    __device__ __forceinline__ void load_weights(const unsigned char* weights, int half, uint32_t (&b)[2 * kSideFragments][2]) {
#pragma unroll
        for (int pair = 0; pair < kSideFragments; pair++) {
            const int first = pair / 2 * kSideColumns + 32 * (thread_ / 64) + pair % 2 * 16;
            uint32_t r[4];
            device::ldmatrix_x4(r, weights + chunk_place(first + lane_ / 16 * 8 + lane_ % 8, 2 * half + lane_ / 8 % 2));
            b[2 * pair][0] = r[0], b[2 * pair][1] = r[1];
            b[2 * pair + 1][0] = r[2], b[2 * pair + 1][1] = r[3];
        }
    }

    TileInputs from_;
    const SideShape shape_;
    const uint8_t* const data_;  // first weight row of the side
    const int last_row_;
    const int thread_, lane_;
    unsigned char* inputs_;
    unsigned char* weights_;
    unsigned char* raw_;
    // What is copied next,
    int copied_ = 0;                          // values of the input rows
    unsigned char* stage_;                    // where this thread's part of them goes
    int copied_bytes_ = 0, copied_half_ = 0;  // of the raw rows
    // and what is decoded.
    uint32_t column_ = 0;     // counts from the beginning of its span
    unsigned char* raw_row_;  // this thread's row in that span's half
    uint32_t low_bits_;       // of the address where it begins in global memory
};

}  // namespace tandem::cuda
