// The one interface between quantised rows and everything that multiplies by them (host side).
//
// Arithmetic: the canonical order of docs/arithmetic.md. Every instruction set gives the same bits; so does every
// number of input rows computed together.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tandem::quant {

// GGML's numbers; the list and each type's block live in types.h.
enum class Type : uint32_t;

enum class Isa { portable, avx2, avx512 };

Isa best_isa();          // what this CPU and this build can do
bool isa_runs(Isa isa);  // compiled in and supported by this CPU
const char* isa_name(Isa isa);

// 256 activations as int8 in blocks of 32, in natural order.
struct alignas(64) ActGroup {
    int8_t q[256];
    float d[8];         // block scale: (amax / 127) * row scale; 0 for a zero block, NaN where a value is not finite
    int16_t sum16[16];  // sums of q over 16 values
};

// One input row in the forms that a weight type may want. `groups` for quantised weights, `values` for F32, F16, BF16.
struct ActRow {
    const ActGroup* groups;
    const float* values;
};

bool type_known(uint32_t ggml_type);
const char* type_name(Type type);
bool type_wants_values(Type type);  // F32, F16, BF16: float activations
int64_t block_values(Type type);
int64_t block_bytes(Type type);
size_t row_bytes(Type type, int64_t num_values);  // num_values: a multiple of block_values

// Index of the first block whose scale or minimum is not finite, or -1.
int64_t first_bad_block(Type type, const void* data, int64_t num_blocks);

// out[num_values] floats, exactly as GGUF defines the type.
void dequantise(Type type, const void* data, int64_t num_values, float* out);

struct RowKernels {
    // num_values floats -> ceil(num_values / 256) groups, the last one padded with zero blocks.
    // num_values: a multiple of 32. row_scale multiplies the block scales (1/rms after a norm, else 1).
    void (*quantise)(const float* x, int64_t num_values, float row_scale, ActGroup* out);
    // 32 floats -> block `place` of a group; its other blocks are left alone.
    void (*quantise_block)(const float* x, float row_scale, ActGroup* out, int place);
    // out[x * out_stride + r] = weight row r . input row x, for r < num_rows and x < num_x (any num_x >= 1).
    void (*dot)(Type type, const uint8_t* weights, size_t row_stride, int64_t num_rows, int64_t num_values, const ActRow* x,
                int64_t num_x, float* out, int64_t out_stride);
    // out[i] = silu(gate[i]) * up[i]
    void (*swiglu)(const float* gate, const float* up, int64_t num_values, float* out);
};

const RowKernels& row_kernels(Isa isa);  // isa must run here

}  // namespace tandem::quant
