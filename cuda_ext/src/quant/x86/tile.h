// Weight rows for many input rows: 32 of them are decoded once and turned so that lanes are rows. Then a block's integer sum needs
// no adding across lanes: each word of four weights is multiplied by the same four activations, broadcast.
#pragma once
#include "quant/x86/frame.h"

namespace tandem::quant {
namespace {

constexpr int kTileRows = 32;

// Up to eight super-blocks of the rows. `words`: of one block, 8 of four bytes or 16 of two int16.
template <int words>
struct alignas(64) Tile {
    uint32_t w[kBlocks][kTree][words][kTileRows];
    float d[kBlocks][kTree][kTileRows];
    float m[kBlocks][kTree][kTileRows];
    float scale[2][kBlocks][kTree][kTileRows];
    float minimum[2][kBlocks][kTree][kTileRows];
};

// What the multiplication must know of a type. Each instruction set chooses its own forms (row_<isa>.cpp).
struct TileForm {
    bool halves;  // scales and minima belong to sixteen weights
    bool minima;
    int words;           // 16: int16, the true weights. 8: unsigned bytes, larger by an offset
    int pairs_in_int16;  // sums of two products of unsigned bytes whose sum fits int16
};

// What the weights in a tile are larger by.
template <class T>
constexpr int tile_offset(TileForm form) {
    if (form.words == 16) return 0;
    return Decoder<T>::weights.is_signed ? 128 : Decoder<T>::weights.offset;
}

// Rows and columns of eight vectors exchanged: element i of vector k comes from element k of vector i.
TANDEM_INLINE void transpose8(__m256i* v) {
    __m256i t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m256i low = v[i], high = v[i + 4];
        v[i] = _mm256_permute2x128_si256(low, high, 0x20);
        v[i + 4] = _mm256_permute2x128_si256(low, high, 0x31);
    }
}

TANDEM_INLINE void store256(void* p, __m256i v) {
    _mm256_store_si256(static_cast<__m256i*>(p), v);
}

// Bytes of weights as int16: the even and the odd ones.
TANDEM_INLINE __m256i even_bytes(__m256i v) {
    return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
}
TANDEM_INLINE __m256i odd_bytes(__m256i v) {
    return _mm256_srai_epi16(v, 8);
}

// Block j of eight rows to words [words][kTileRows], from the tile's row `first` on.
template <class D, TileForm form>
TANDEM_INLINE void turn_weights(const Super* rows, int j, uint32_t (*out)[kTileRows], int first) {
    __m256i v[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) v[r] = rows[r].w[j];
    transpose8(v);
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        if constexpr (form.words == 16) {
            const __m256i w = D::weights.is_signed ? v[k] : _mm256_sub_epi8(v[k], _mm256_set1_epi8(D::weights.offset));
            store256(out[2 * k] + first, even_bytes(w));
            store256(out[2 * k + 1] + first, odd_bytes(w));
        } else {
            const __m256i w = D::weights.is_signed ? _mm256_xor_si256(v[k], _mm256_set1_epi8(-128)) : v[k];
            store256(out[k] + first, w);
        }
    }
}

// One float per block of eight rows to [place][super-block s][kTileRows].
template <class Part>
TANDEM_INLINE void turn_floats(Part part, float (*out)[kTree][kTileRows], int s, int first) {
    __m256i v[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) v[r] = _mm256_castps_si256(part(r));
    transpose8(v);
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; j++) store256(out[j][s] + first, v[j]);
}

// Super-block s of a run, of eight rows from `first` on.
template <class T, TileForm form>
TANDEM_INLINE void turn_super(const Super* rows, Tile<form.words>& tile, int s, int first) {
    using D = Decoder<T>;
    for (int j = 0; j < kBlocks; j++) turn_weights<D, form>(rows, j, tile.w[j][s], first);
    turn_floats([&](int r) { return rows[r].d; }, tile.d, s, first);
    if constexpr (T::has_minima) turn_floats([&](int r) { return rows[r].m; }, tile.m, s, first);
    if constexpr (D::weights.halves) {
        for (int h = 0; h < 2; h++) turn_floats([&](int r) { return rows[r].scale[h]; }, tile.scale[h], s, first);
        if constexpr (T::has_minima) {
            turn_floats([&](int r) { return floats_of_even_i16(rows[r].minima); }, tile.minimum[0], s, first);
            turn_floats([&](int r) { return floats_of_odd_i16(rows[r].minima); }, tile.minimum[1], s, first);
        }
    }
}

// The super-blocks `begin` .. `begin + count` of kTileRows rows.
template <class T, TileForm form>
void fill(const uint8_t* weights, size_t row_stride, int64_t num_values, int64_t begin, int count, Tile<form.words>& tile) {
    for (int first = 0; first < kTileRows; first += 8) {
        const uint8_t* row = weights + static_cast<size_t>(first) * row_stride;
        for (int s = 0; s < count; s++) {
            Super supers[8];
            uint8_t rest[kSuperBytes<T>];
            for (int r = 0; r < 8; r++)
                Decoder<T>::decode(super_at<T>(row + static_cast<size_t>(r) * row_stride, num_values, begin + s, rest), supers[r]);
            turn_super<T, form>(supers, tile, s, first);
        }
    }
}

}  // namespace
}  // namespace tandem::quant
