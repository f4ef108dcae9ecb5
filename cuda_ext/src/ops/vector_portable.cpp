#include <cstring>

#include "ops/vector_impl.h"
#include "quant/scalar.h"

namespace tandem {
namespace {

struct PortableLanes {
    static constexpr int kWidth = 8;
    static constexpr int kVecs = 2;
    struct Vec {
        float lane[kWidth];
    };

    template <class Fn>
    static Vec each(Fn&& fn) {
        Vec out;
        for (int i = 0; i < kWidth; i++) out.lane[i] = fn(i);
        return out;
    }
    static Vec load(const float* x) {
        return each([&](int i) { return x[i]; });
    }
    static Vec load(const uint16_t* x) {
        return each([&](int i) { return quant::f16_float(x[i]); });
    }
    static Vec load(const int8_t* x) {
        return each([&](int i) { return static_cast<float>(x[i]); });
    }
    static void store(float* out, const Vec& x) { std::memcpy(out, x.lane, sizeof x.lane); }
    static Vec set1(float x) {
        return each([&](int) { return x; });
    }
    static Vec add(const Vec& a, const Vec& b) {
        return each([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    static Vec mul(const Vec& a, const Vec& b) {
        return each([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    static Vec fma(const Vec& a, const Vec& b, const Vec& c) {
        return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
    }
    // As the SSE instructions: the second operand if either is NaN.
    static Vec min(const Vec& a, const Vec& b) {
        return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    static Vec max(const Vec& a, const Vec& b) {
        return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    static Vec pow2(const Vec& n) {
        return each([&](int i) {
            const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.lane[i]) + 127) << 23;
            float out;
            std::memcpy(&out, &bits, sizeof out);
            return out;
        });
    }

    struct Wholes {
        int64_t lane[kWidth] = {};

        void add(const Vec& x) {
            for (int i = 0; i < kWidth; i++) lane[i] += std::llrint(x.lane[i]);
        }
        void store(int64_t* out) const { std::memcpy(out, lane, sizeof lane); }
    };
};

uint16_t narrow_one(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00 | ((bits >> 13) & 1023);  // NaN
    if (bits >= 0x477ff000) return sign | 0x7c00;                         // rounds to infinity
    if (bits < 0x38800000) {                                              // subnormal: let the adder round
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, sizeof bits);
        return sign | static_cast<uint16_t>(bits - 0x3f000000);
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return sign | static_cast<uint16_t>((bits - (112u << 23)) >> 13);
}

void narrow(const float* x, int64_t num, uint16_t* out) {
    for (int64_t i = 0; i < num; i++) out[i] = narrow_one(x[i]);
}

using Portable = Kernels<PortableLanes>;

}  // namespace

const VectorKernels kVectorPortable{Portable::add_scaled,  Portable::merge_scaled, Portable::exp_below,
                                    Portable::attend_tile, Portable::widen,        narrow,
                                    Portable::widen_keys,  Portable::widen_values, Portable::router_sums};

const VectorKernels& vector_kernels(quant::Isa isa) {
#ifdef TANDEM_X86
    if (isa == quant::Isa::avx512) return kVectorAvx512;
    if (isa == quant::Isa::avx2) return kVectorAvx2;
#endif
    (void)isa;
    return kVectorPortable;
}

}  // namespace tandem
