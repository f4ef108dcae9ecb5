// Input rows as a tile's multiplication wants them.
#pragma once
#include "quant/x86/tile.h"

namespace tandem::quant {
namespace {

constexpr int kTileInputs = 16;  // input rows that are made ready together

// What a run's blocks of one place bring besides their values, by super-block.
struct alignas(32) PlaceScales {
    float d[kTree];
    int32_t start[2][kTree];  // -offset * sum of q: of the block, or of its halves
    float sum[2][kTree];      // sum of q likewise, for types with minima
};

// Up to eight super-blocks of one input row, by place, so that each place is read in one piece.
template <int words>
struct alignas(64) TileInput {
    PlaceScales scales[kBlocks];
    uint32_t q[kBlocks][kTree][words];  // bytes; or int16 in the order of even_bytes and odd_bytes
};

template <TileForm form>
void prepare_scales(const ActGroup* x, int count, int offset, PlaceScales* out) {
    __m256i d[kTree], start[2][kTree], sum[2][kTree];
    for (int s = 0; s < kTree; s++) {
        d[s] = s < count ? load256(x[s].d) : _mm256_setzero_si256();
        const __m256i sum16 = s < count ? load256(x[s].sum16) : _mm256_setzero_si256();
        const __m256i first = _mm256_srai_epi32(_mm256_slli_epi32(sum16, 16), 16), last = _mm256_srai_epi32(sum16, 16);
        const __m256i sums[2] = {form.halves ? first : _mm256_add_epi32(first, last), last};
        for (int h = 0; h < 2; h++) {
            start[h][s] = _mm256_mullo_epi32(sums[h], _mm256_set1_epi32(-offset));
            sum[h][s] = _mm256_castps_si256(_mm256_cvtepi32_ps(sums[h]));
        }
    }
    const auto turn = [out](__m256i* v, auto to) {
        transpose8(v);
        for (int j = 0; j < kBlocks; j++) store256(to(out[j]), v[j]);
    };
    turn(d, [](PlaceScales& p) { return p.d; });
    for (int h = 0; h < (form.halves ? 2 : 1); h++) {
        turn(start[h], [h](PlaceScales& p) { return p.start[h]; });
        if (form.minima) turn(sum[h], [h](PlaceScales& p) { return p.sum[h]; });
    }
}

template <TileForm form>
void prepare(const ActRow& row, int offset, int64_t begin, int count, TileInput<form.words>& out) {
    const ActGroup* groups = row.groups + begin;
    prepare_scales<form>(groups, count, offset, out.scales);
    for (int s = 0; s < count; s++)
        for (int j = 0; j < kBlocks; j++) {
            const __m256i q = load256(groups[s].q + kBlock * j);
            if constexpr (form.words == 16) {
                const __m256i even = even_bytes(q), odd = odd_bytes(q);
                const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
                store256(out.q[j][s], _mm256_permute2x128_si256(low, high, 0x20));
                store256(out.q[j][s] + 8, _mm256_permute2x128_si256(low, high, 0x31));
            } else {
                store256(out.q[j][s], q);
            }
        }
}

}  // namespace
}  // namespace tandem::quant
