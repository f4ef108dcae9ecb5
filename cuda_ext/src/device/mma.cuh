// Tensor cores: one warp multiplies small matrices that lie in its registers. All 32 lanes call together.
//
// With group = lane / 4 and place = lane % 4 (PTX ISA, "Matrix fragments"):
//   mma_s8   A [16, 32] int8, four per register, lowest byte first
//              a[0] row group,     columns 4 place ..      a[1] row group + 8, the same columns
//              a[2] row group,     columns 16 + 4 place .. a[3] row group + 8, the same columns
//            B [32, 8]  b[0] rows 4 place .., column group    b[1] rows 16 + 4 place ..
//   mma_f16  A [16, 16] half, two per register
//              a[0] row group,     columns 2 place ..      a[1] row group + 8
//              a[2] row group,     columns 8 + 2 place ..  a[3] row group + 8
//            B [16, 8]  b[0] rows 2 place .., column group    b[1] rows 8 + 2 place ..
//   both     D [16, 8]  d[0], d[1] row group, columns 2 place, 2 place + 1    d[2], d[3] row group + 8
#pragma once
#include <cstdint>

namespace tandem::device {

// d += a * b, exact.
__device__ __forceinline__ void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a * b; the order and rounding of the sixteen products is the hardware's own.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit values from shared memory. Lane 8 i + r says where row r of matrix i (16 bytes, aligned) lies;
// r[i] gets row lane / 4, columns 2 (lane % 4) and one more, of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared_row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed: r[i] gets rows 2 (lane % 4) and one more, column lane / 4, of matrix i.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* shared_row) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared_row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace tandem::device
