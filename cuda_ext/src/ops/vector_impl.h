// The kernels of vector.h over `Lanes`, a register of some instruction set. Included once by each vector_<isa>.cpp, behind
// its Lanes; everything is in an anonymous namespace so that no linker mixes code of different instruction sets.
//
// Lanes: Vec, kWidth, kVecs (so many registers of each of four rows, and what the rows share, fit), load of floats, halves (bits)
// or int8, store, set1, add, mul, fma(a, b, c) = a * b + c rounded once, min, max, pow2(n) = 2^n for whole n in [-126, 127].
// min and max give the second operand if either is NaN. Wholes: as many 64-bit integers, zero at first: add(x) adds the floats of
// x, at most 2^50, rounded to nearest even; store.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/router_sum.h"
#include "ops/vector.h"

namespace tandem {
namespace {

template <class Lanes>
struct Kernels {
    using Vec = typename Lanes::Vec;
    static constexpr int kWidth = Lanes::kWidth;
    static constexpr int kVecs = Lanes::kVecs;  // registers per row of a register tile
    static constexpr int kBlock = kVecs * kWidth;
    static_assert(kKvTile % kBlock == 0);

    static Vec exp(Vec x) {
        constexpr float kLog2e = 1.44269504f, kMagic = 12582912.f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
        constexpr float kCoefficients[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                           4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
        x = Lanes::min(Lanes::max(x, Lanes::set1(-87.f)), Lanes::set1(88.f));
        const Vec n = Lanes::add(Lanes::fma(x, Lanes::set1(kLog2e), Lanes::set1(kMagic)), Lanes::set1(-kMagic));
        Vec r = Lanes::fma(n, Lanes::set1(-kLn2High), x);
        r = Lanes::fma(n, Lanes::set1(-kLn2Low), r);
        Vec p = Lanes::set1(kCoefficients[0]);
        for (int i = 1; i < 6; i++) p = Lanes::fma(p, r, Lanes::set1(kCoefficients[i]));
        p = Lanes::fma(p, Lanes::mul(r, r), Lanes::add(r, Lanes::set1(1.f)));
        return Lanes::mul(p, Lanes::pow2(n));
    }

    static float exp(float x) {
        alignas(64) float lanes[kWidth];
        Lanes::store(lanes, exp(Lanes::set1(x)));
        return lanes[0];
    }

    static void exp_below(const float* x, float max, int64_t num, float* out) {
        const Vec shift = Lanes::set1(-max);
        int64_t i = 0;
        for (; i + kWidth <= num; i += kWidth) Lanes::store(out + i, exp(Lanes::add(Lanes::load(x + i), shift)));
        if (i == num) return;
        alignas(64) float rest[kWidth] = {};
        std::memcpy(rest, x + i, (num - i) * sizeof(float));
        Lanes::store(rest, exp(Lanes::add(Lanes::load(rest), shift)));
        std::memcpy(out + i, rest, (num - i) * sizeof(float));
    }

    static void add_scaled(float weight, const float* x, int64_t num, float* out) {
        const Vec w = Lanes::set1(weight);
        int64_t i = 0;
        for (; i + kWidth <= num; i += kWidth) Lanes::store(out + i, Lanes::fma(w, Lanes::load(x + i), Lanes::load(out + i)));
        for (; i < num; i++) out[i] = std::fma(weight, x[i], out[i]);
    }

    static void merge_scaled(float a, float b, const float* x, int64_t num, float* out) {
        const Vec va = Lanes::set1(a), vb = Lanes::set1(b);
        int64_t i = 0;
        for (; i + kWidth <= num; i += kWidth)
            Lanes::store(out + i, Lanes::fma(Lanes::load(out + i), va, Lanes::mul(Lanes::load(x + i), vb)));
        for (; i < num; i++) out[i] = std::fma(out[i], a, x[i] * b);
    }

    static void widen(const uint16_t* x, int64_t num, float* out) {
        int64_t i = 0;
        for (; i + kWidth <= num; i += kWidth) Lanes::store(out + i, Lanes::load(x + i));
        if (i == num) return;
        uint16_t rest[kWidth] = {};
        alignas(64) float floats[kWidth];
        std::memcpy(rest, x + i, (num - i) * sizeof *rest);
        Lanes::store(floats, Lanes::load(rest));
        std::memcpy(out + i, floats, (num - i) * sizeof *floats);
    }

    static void widen_keys(const int8_t* keys, const uint16_t* scales, int head_dim, float* out) {
        constexpr int kTileVecs = kKvTile / kWidth;
        for (int begin = 0; begin < head_dim; begin += kKvGroup, scales += kKvTile) {
            Vec scale[kTileVecs];
            for (int v = 0; v < kTileVecs; v++) scale[v] = Lanes::load(scales + v * kWidth);
            for (int d = begin; d < std::min(begin + kKvGroup, head_dim); d++)
                for (int v = 0; v < kTileVecs; v++) {
                    const int at = d * kKvTile + v * kWidth;
                    Lanes::store(out + at, Lanes::mul(Lanes::load(keys + at), scale[v]));
                }
        }
    }

    static void widen_values(const int8_t* values, const uint16_t* scales, int head_dim, float* out) {
        alignas(64) float floats[kv_groups(kMaxHeadDim) * kKvTile];
        widen(scales, kv_groups(head_dim) * kKvTile, floats);
        for (int j = 0; j < kKvTile; j++, values += head_dim, out += head_dim)
            for (int begin = 0; begin < head_dim; begin += kKvGroup) {
                const float scale = floats[begin / kKvGroup * kKvTile + j];
                const int end = std::min(begin + kKvGroup, head_dim);
                int d = begin;
                for (; d + kWidth <= end; d += kWidth)
                    Lanes::store(out + d, Lanes::mul(Lanes::load(values + d), Lanes::set1(scale)));
                for (; d < end; d++) out[d] = static_cast<float>(values[d]) * scale;
            }
    }

    // scores[h][j] for kHeads heads and the first positions of the tile, a register tile at a time.
    template <int kHeads>
    static void score(const TileProblem& p, int head, float (*scores)[kKvTile]) {
        const float* q = p.query + int64_t{head} * p.head_dim;
        for (int begin = 0; begin < p.count; begin += kBlock) {
            Vec acc[kHeads][kVecs];
            for (int h = 0; h < kHeads; h++)
                for (int v = 0; v < kVecs; v++) acc[h][v] = Lanes::set1(0.f);
            for (int d = 0; d < p.head_dim; d++) {
                const float* k = p.keys + int64_t{d} * kKvTile + begin;
                Vec key[kVecs];
                for (int v = 0; v < kVecs; v++) key[v] = Lanes::load(k + v * kWidth);
                for (int h = 0; h < kHeads; h++) {
                    const Vec query = Lanes::set1(q[h * p.head_dim + d]);
                    for (int v = 0; v < kVecs; v++) acc[h][v] = Lanes::fma(query, key[v], acc[h][v]);
                }
            }
            const Vec scale = Lanes::set1(p.scale);
            for (int h = 0; h < kHeads; h++)
                for (int v = 0; v < kVecs; v++) Lanes::store(scores[h] + begin + v * kWidth, Lanes::mul(acc[h][v], scale));
        }
    }

    // Turns scores into exp(score - max'), updates the state, returns the factor of what was summed before.
    static float advance(int count, float* scores, SoftmaxState& state) {
        float max = state.max;
        for (int j = 0; j < count; j++) max = scores[j] > max ? scores[j] : max;
        exp_below(scores, max, count, scores);
        const float before = exp(state.max - max);
        state.sum = std::fma(state.sum, before, sum8(scores, count));
        state.max = max;
        return before;
    }

    // out[h][d .. d + kWidth * kNum) of kHeads heads
    template <int kHeads, int kNum>
    static void mix(const TileProblem& p, int head, int d, const float (*weights)[kKvTile], const float* before) {
        float* out = p.out + int64_t{head} * p.head_dim + d;
        Vec acc[kHeads][kNum];
        for (int h = 0; h < kHeads; h++)
            for (int v = 0; v < kNum; v++)
                acc[h][v] = Lanes::mul(Lanes::load(out + h * p.head_dim + v * kWidth), Lanes::set1(before[h]));
        for (int j = 0; j < p.count; j++) {
            const float* value = p.values + int64_t{j} * p.head_dim + d;
            Vec row[kNum];
            for (int v = 0; v < kNum; v++) row[v] = Lanes::load(value + v * kWidth);
            for (int h = 0; h < kHeads; h++) {
                const Vec weight = Lanes::set1(weights[h][j]);
                for (int v = 0; v < kNum; v++) acc[h][v] = Lanes::fma(weight, row[v], acc[h][v]);
            }
        }
        for (int h = 0; h < kHeads; h++)
            for (int v = 0; v < kNum; v++) Lanes::store(out + h * p.head_dim + v * kWidth, acc[h][v]);
    }

    static void mix_rest(const TileProblem& p, int head, int d, const float* weights, float before) {
        float& out = p.out[int64_t{head} * p.head_dim + d];
        float acc = out * before;
        for (int j = 0; j < p.count; j++) acc = std::fma(weights[j], p.values[int64_t{j} * p.head_dim + d], acc);
        out = acc;
    }

    template <int kHeads>
    static void attend_heads(const TileProblem& p, int head) {
        alignas(64) float scores[kHeads][kKvTile];
        float before[kHeads];
        score<kHeads>(p, head, scores);
        for (int h = 0; h < kHeads; h++) before[h] = advance(p.count, scores[h], p.states[head + h]);
        int d = 0;
        for (; d + kBlock <= p.head_dim; d += kBlock) mix<kHeads, kVecs>(p, head, d, scores, before);
        for (; d + kWidth <= p.head_dim; d += kWidth) mix<kHeads, 1>(p, head, d, scores, before);
        for (; d < p.head_dim; d++)
            for (int h = 0; h < kHeads; h++) mix_rest(p, head + h, d, scores[h], before[h]);
    }

    // kGroups whole groups from `begin` on, for kNum registers of experts.
    template <int kGroups, int kNum>
    static void add_groups(const RouterTile& t, int first, int64_t begin, int count, typename Lanes::Wholes* sums) {
        Vec dots[kGroups][kNum];
        for (auto& group : dots)
            for (Vec& dot : group) dot = Lanes::set1(0.f);
        for (int i = 0; i < count; i++)
            for (int g = 0; g < kGroups; g++) {
                const int64_t at = begin + g * kRouterGroup + i;
                const Vec y = Lanes::set1(t.x[at] * t.gamma[at]);
                const float* weights = t.weights + at * t.stride + first;
                for (int v = 0; v < kNum; v++) dots[g][v] = Lanes::fma(Lanes::load(weights + v * kWidth), y, dots[g][v]);
            }
        const Vec most = Lanes::set1(kRouterBound), least = Lanes::set1(-kRouterBound), scale = Lanes::set1(kRouterScale);
        for (auto& group : dots)
            for (int v = 0; v < kNum; v++) sums[v].add(Lanes::mul(Lanes::max(Lanes::min(group[v], most), least), scale));
    }

    template <int kNum>
    static void router_vecs(const RouterTile& t, int first) {
        typename Lanes::Wholes sums[kNum];
        int64_t begin = 0;
        for (; begin + 2 * kRouterGroup <= t.width; begin += 2 * kRouterGroup)
            add_groups<2, kNum>(t, first, begin, kRouterGroup, sums);
        for (; begin < t.width; begin += kRouterGroup)
            add_groups<1, kNum>(t, first, begin, static_cast<int>(std::min<int64_t>(kRouterGroup, t.width - begin)), sums);
        for (int v = 0; v < kNum; v++) sums[v].store(t.sums + first + v * kWidth);
    }

    static int64_t router_sum(const RouterTile& t, int expert) {
        int64_t sum = 0;
        for (int64_t begin = 0; begin < t.width; begin += kRouterGroup) {
            float dot = 0.f;
            for (int64_t i = begin; i < std::min(begin + kRouterGroup, t.width); i++)
                dot = std::fma(t.weights[i * t.stride + expert], t.x[i] * t.gamma[i], dot);
            dot = dot < kRouterBound ? dot : kRouterBound;
            sum += std::llrint((dot > -kRouterBound ? dot : -kRouterBound) * kRouterScale);
        }
        return sum;
    }

    static void router_sums(const RouterTile& t) {
        int expert = 0;
        for (; expert + 2 * kWidth <= t.num_experts; expert += 2 * kWidth) router_vecs<2>(t, expert);
        for (; expert + kWidth <= t.num_experts; expert += kWidth) router_vecs<1>(t, expert);
        for (; expert < t.num_experts; expert++) t.sums[expert] = router_sum(t, expert);
    }

    static void attend_tile(const TileProblem& p) {
        int head = 0;  // four at a time: keys and values of a tile are more than the nearest cache holds
        for (; head + 4 <= p.num_heads; head += 4) attend_heads<4>(p, head);
        if (head + 2 <= p.num_heads) attend_heads<2>(p, head), head += 2;
        if (head < p.num_heads) attend_heads<1>(p, head);
    }
};

}  // namespace
}  // namespace tandem
