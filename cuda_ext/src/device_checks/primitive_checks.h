// Small kernels around the device primitives, for tests: each has a plain formula that it must meet.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace tandem::device_checks {

// d [16, 8] = a [16, 32] b [32, 8], through mma_s8 and the layout that device/mma.cuh documents.
void multiply_s8(const int8_t* a, const int8_t* b, int32_t* d, cudaStream_t stream);

// d [16, 16] = a [16, 16] b [16, 16] of halves (as bits), through ldmatrix_x4, ldmatrix_x4_transposed and mma_f16.
void multiply_f16(const uint16_t* a, const uint16_t* b, float* d, cudaStream_t stream);

// values [32] -> out [kWarpResults, 32]: shuffles (xor 5, from lane 3 of eight, down 3, up 3), sum, smallest, largest, odd lanes'
// ballot.
constexpr int kWarpResults = 8;
void warp_operations(const int32_t* values, int32_t* out, cudaStream_t stream);

// Copies num_rows rows of row_bytes, at any alignment, through two stages of a warp each; the warps of one block share them.
void copy_staged(const uint8_t* rows, size_t row_bytes, int num_rows, uint8_t* out, cudaStream_t stream);

// The same bytes in groups of 16 by single threads; row_bytes a multiple of 16 and `rows` aligned.
void copy_grouped(const uint8_t* rows, size_t row_bytes, int num_rows, uint8_t* out, cudaStream_t stream);

// Two dependent kernels: the first writes value + i, the second out[i] = 2 * that of its neighbour.
void chain(int32_t value, int32_t* between, int32_t* out, int num, cudaStream_t stream);

// counter[0] += 1 by the last block to finish; ticket is 0 before and after.
void count_run(unsigned* ticket, int32_t* counter, cudaStream_t stream);

// Posts `value` to the host and waits for its answer, which goes to out[0].
void ask_host(uint32_t value, uint32_t* posted, const uint32_t* answered, const uint32_t* answer, uint32_t* out,
              cudaStream_t stream);

// Errors that the emulation must find; on a card they are undefined.
enum class Mistake { lane_missing, different_operations, barrier_missing, shared_overrun, copy_not_awaited, no_prerequisites };
void make_mistake(Mistake mistake, int32_t* out, cudaStream_t stream);

}  // namespace tandem::device_checks
