// Emulation of device/mma.cuh, whose head says how the matrices lie in the lanes' registers.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace tandem::device {

namespace emulated {

using Lanes = void* const (&)[emulation::kLanes];

template <typename Sum>
struct MmaLane {
    Sum* d;
    const uint32_t* a;
    const uint32_t* b;
};

// D [16, 8] += A [16, columns] B [columns, 8]; `packed` values of A and B lie in a register, value(register, i) is one of them.
template <typename Sum, typename Exact, int columns, int packed, typename Value>
void multiply(Lanes lanes, Value value) {
    auto lane = [&](int i) -> const MmaLane<Sum>& { return *static_cast<const MmaLane<Sum>*>(lanes[i]); };
    constexpr int half = columns / 2;
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            Exact total = 0;
            for (int k = 0; k < columns; k++) {
                const int place = k % half / packed, upper = k / half;
                const uint32_t a = lane(row % 8 * 4 + place).a[row / 8 + 2 * upper], b = lane(column * 4 + place).b[upper];
                total += static_cast<Exact>(value(a, k % packed)) * static_cast<Exact>(value(b, k % packed));
            }
            Sum& d = lane(row % 8 * 4 + column / 2).d[row / 8 * 2 + column % 2];
            d = static_cast<Sum>(static_cast<Exact>(d) + total);
        }
}

struct MatrixLane {
    uint32_t* r;
    const void* row;
};

template <bool transposed>
void load_matrices(Lanes lanes) {
    for (int matrix = 0; matrix < 4; matrix++)
        for (int i = 0; i < emulation::kLanes; i++) {
            uint16_t pair[2];
            for (int k = 0; k < 2; k++) {
                const int row = transposed ? i % 4 * 2 + k : i / 4, column = transposed ? i / 4 : i % 4 * 2 + k;
                const void* start = static_cast<const MatrixLane*>(lanes[8 * matrix + row])->row;
                std::memcpy(&pair[k], static_cast<const uint8_t*>(start) + 2 * column, 2);
            }
            static_cast<MatrixLane*>(lanes[i])->r[matrix] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
        }
}

inline void require_row(const void* row) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
        emulation::current->block->fail("gives ldmatrix a row that is not aligned to 16 bytes");
}

}  // namespace emulated

inline void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Place place = Place::current()) {
    emulated::MmaLane<int32_t> mine{d, a, b};
    emulation::current->block->meet(
        "mma_s8", &mine,
        [](emulated::Lanes lanes) {
            emulated::multiply<int32_t, int64_t, 32, 4>(lanes, [](uint32_t x, int i) { return static_cast<int8_t>(x >> (8 * i)); });
        },
        place);
}

inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Place place = Place::current()) {
    emulated::MmaLane<float> mine{d, a, b};
    emulation::current->block->meet(
        "mma_f16", &mine,
        [](emulated::Lanes lanes) {
            emulated::multiply<float, double, 16, 2>(lanes, [](uint32_t x, int i) {
                return __half2float(__ushort_as_half(static_cast<unsigned short>(x >> (16 * i))));
            });
        },
        place);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row, Place place = Place::current()) {
    emulated::require_row(shared_row);
    emulated::MatrixLane mine{r, shared_row};
    emulation::current->block->meet("ldmatrix_x4", &mine, &emulated::load_matrices<false>, place);
}

inline void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* shared_row, Place place = Place::current()) {
    emulated::require_row(shared_row);
    emulated::MatrixLane mine{r, shared_row};
    emulation::current->block->meet("ldmatrix_x4_transposed", &mine, &emulated::load_matrices<true>, place);
}

}  // namespace tandem::device
