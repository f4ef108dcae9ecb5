// The scalar functions of CUDA C++ that device code uses, with the bits that a card gives.
#pragma once
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>

using std::isfinite;
using std::isinf;
using std::isnan;

// ---- float, each rounded once to nearest even (compile without contraction) ----

inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}
inline float __fsqrt_rn(float x) {
    return std::sqrt(x);
}
inline float __frcp_rn(float x) {
    return 1.0f / x;
}
inline double __dadd_rn(double a, double b) {
    return a + b;
}
inline double __dmul_rn(double a, double b) {
    return a * b;
}
inline double __fma_rn(double a, double b, double c) {
    return __builtin_fma(a, b, c);
}

// Approximations: a card's last bits differ.
inline float rsqrtf(float x) {
    return 1.0f / std::sqrt(x);
}
inline float __expf(float x) {
    return std::exp(x);
}
inline float __logf(float x) {
    return std::log(x);
}
inline float __fdividef(float a, float b) {
    return a / b;
}

// ---- conversions ----

template <typename To, typename From>
To tandem_saturated(From x) {
    if (std::isnan(x)) return 0;
    const From low = static_cast<From>(std::numeric_limits<To>::min()), high = static_cast<From>(std::numeric_limits<To>::max());
    if (x <= low) return std::numeric_limits<To>::min();
    return x >= high ? std::numeric_limits<To>::max() : static_cast<To>(x);
}
inline int __float2int_rn(float x) {
    return tandem_saturated<int>(std::nearbyint(x));
}
inline int __float2int_rz(float x) {
    return tandem_saturated<int>(std::trunc(x));
}
inline int __float2int_rd(float x) {
    return tandem_saturated<int>(std::floor(x));
}
inline int __float2int_ru(float x) {
    return tandem_saturated<int>(std::ceil(x));
}
inline unsigned __float2uint_rn(float x) {
    return tandem_saturated<unsigned>(std::nearbyint(x));
}
inline unsigned __float2uint_rz(float x) {
    return tandem_saturated<unsigned>(std::trunc(x));
}
inline long long __float2ll_rn(float x) {
    return tandem_saturated<long long>(std::nearbyint(x));
}
inline long long __double2ll_rn(double x) {
    return tandem_saturated<long long>(std::nearbyint(x));
}
inline int __double2int_rn(double x) {
    return tandem_saturated<int>(std::nearbyint(x));
}
inline float __int2float_rn(int x) {
    return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x) {
    return static_cast<float>(x);
}
inline float __ll2float_rn(long long x) {
    return static_cast<float>(x);
}
inline float __double2float_rn(double x) {
    return static_cast<float>(x);
}
inline double __ll2double_rn(long long x) {
    return static_cast<double>(x);
}
inline int __float_as_int(float x) {
    return std::bit_cast<int>(x);
}
inline unsigned __float_as_uint(float x) {
    return std::bit_cast<unsigned>(x);
}
inline float __int_as_float(int x) {
    return std::bit_cast<float>(x);
}
inline float __uint_as_float(unsigned x) {
    return std::bit_cast<float>(x);
}

// ---- bits and bytes ----

inline int __popc(unsigned x) {
    return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
    return std::popcount(x);
}
inline int __clz(int x) {
    return std::countl_zero(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
    return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (x >> i & 1) << (31 - i);
    return result;
}

// Byte i of the result is byte (selector >> 4 i) & 7 of y:x; bit 3 spreads that byte's sign instead.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned source = selector >> (4 * i) & 7;  // a fourth bit is not looked at, unlike by the instruction
        result |= (static_cast<unsigned>(bytes >> (8 * source)) & 255) << (8 * i);
    }
    return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}

template <typename A, typename B, typename Sum>
Sum tandem_dp4a(unsigned a, unsigned b, Sum sum) {
    auto total = static_cast<unsigned>(sum);
    for (int i = 0; i < 4; i++) {
        const int product = static_cast<A>(a >> (8 * i) & 255) * static_cast<B>(b >> (8 * i) & 255);
        total += static_cast<unsigned>(product);
    }
    return static_cast<Sum>(total);
}
inline int __dp4a(int a, int b, int sum) {
    return tandem_dp4a<int8_t, int8_t>(static_cast<unsigned>(a), static_cast<unsigned>(b), sum);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    return tandem_dp4a<uint8_t, uint8_t>(a, b, sum);
}

// Four bytes at once.
template <typename Each>
unsigned tandem_each_byte(unsigned a, unsigned b, Each each) {
    unsigned result = 0;
    for (int i = 0; i < 32; i += 8) result |= (each(a >> i & 255, b >> i & 255) & 255) << i;
    return result;
}
inline unsigned __vadd4(unsigned a, unsigned b) {
    return tandem_each_byte(a, b, [](unsigned x, unsigned y) { return x + y; });
}
inline unsigned __vsub4(unsigned a, unsigned b) {
    return tandem_each_byte(a, b, [](unsigned x, unsigned y) { return x - y; });
}
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
    return tandem_each_byte(a, b, [](unsigned x, unsigned y) { return x == y ? 255u : 0u; });
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
    return ~__vcmpeq4(a, b);
}
inline unsigned __vsubss4(unsigned a, unsigned b) {
    return tandem_each_byte(a, b, [](unsigned x, unsigned y) {
        const int difference = static_cast<int8_t>(x) - static_cast<int8_t>(y);
        return static_cast<unsigned>(std::clamp(difference, -128, 127));
    });
}

inline int __mulhi(int a, int b) {
    return static_cast<int>(static_cast<int64_t>(a) * b >> 32);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __mul24(int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a << 8 >> 8) * static_cast<unsigned>(b << 8 >> 8));
}

// ---- min and max are plain functions in CUDA C++ ----

inline int min(int a, int b) {
    return std::min(a, b);
}
inline int max(int a, int b) {
    return std::max(a, b);
}
inline unsigned min(unsigned a, unsigned b) {
    return std::min(a, b);
}
inline unsigned max(unsigned a, unsigned b) {
    return std::max(a, b);
}
inline unsigned min(int a, unsigned b) {
    return std::min(static_cast<unsigned>(a), b);
}
inline unsigned max(int a, unsigned b) {
    return std::max(static_cast<unsigned>(a), b);
}
inline unsigned min(unsigned a, int b) {
    return min(b, a);
}
inline unsigned max(unsigned a, int b) {
    return max(b, a);
}
inline long min(long a, long b) {
    return std::min(a, b);
}
inline long max(long a, long b) {
    return std::max(a, b);
}
inline unsigned long min(unsigned long a, unsigned long b) {
    return std::min(a, b);
}
inline unsigned long max(unsigned long a, unsigned long b) {
    return std::max(a, b);
}
inline long long min(long long a, long long b) {
    return std::min(a, b);
}
inline long long max(long long a, long long b) {
    return std::max(a, b);
}
inline float min(float a, float b) {
    return std::fmin(a, b);
}
inline float max(float a, float b) {
    return std::fmax(a, b);
}

// ---- memory ----

template <typename T>
T __ldg(const T* p) {
    return *p;
}
template <typename T>
T __ldcg(const T* p) {
    return *p;
}
template <typename T>
T __ldca(const T* p) {
    return *p;
}
template <typename T>
T __ldcs(const T* p) {
    return *p;
}
template <typename T>
T __ldcv(const T* p) {
    static_assert(sizeof(T) % sizeof(uint32_t) == 0);
    T value;
    for (size_t i = 0; i < sizeof(T) / sizeof(uint32_t); i++)
        reinterpret_cast<uint32_t*>(&value)[i] = reinterpret_cast<const volatile uint32_t*>(p)[i];
    return value;
}
template <typename T>
void __stcg(T* p, T value) {
    *p = value;
}
template <typename T>
void __stcs(T* p, T value) {
    *p = value;
}
template <typename T>
void __stwt(T* p, T value) {
    *p = value;
}

inline void __threadfence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_system() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// Returns the old value; `next` makes the new one of it.
template <typename T, typename Next>
T tandem_atomic(T* p, Next next) {
    T old, value;
    __atomic_load(p, &old, __ATOMIC_SEQ_CST);
    do value = next(old);
    while (!__atomic_compare_exchange(p, &old, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
    return tandem_atomic(p, [value](T old) { return static_cast<T>(old + value); });
}
template <typename T>
T atomicSub(T* p, std::type_identity_t<T> value) {
    return tandem_atomic(p, [value](T old) { return static_cast<T>(old - value); });
}
template <typename T>
T atomicMax(T* p, std::type_identity_t<T> value) {
    return tandem_atomic(p, [value](T old) { return old < value ? value : old; });
}
template <typename T>
T atomicMin(T* p, std::type_identity_t<T> value) {
    return tandem_atomic(p, [value](T old) { return value < old ? value : old; });
}
template <typename T>
T atomicOr(T* p, std::type_identity_t<T> value) {
    return tandem_atomic(p, [value](T old) { return static_cast<T>(old | value); });
}
template <typename T>
T atomicAnd(T* p, std::type_identity_t<T> value) {
    return tandem_atomic(p, [value](T old) { return static_cast<T>(old & value); });
}
template <typename T>
T atomicExch(T* p, std::type_identity_t<T> value) {
    return tandem_atomic(p, [value](T) { return value; });
}
template <typename T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    return tandem_atomic(p, [=](T old) { return old == expected ? value : old; });
}
// Wraps to 0 once the old value has reached `limit`.
inline unsigned atomicInc(unsigned* p, unsigned limit) {
    return tandem_atomic(p, [limit](unsigned old) { return old >= limit ? 0 : old + 1; });
}

inline void __nanosleep(unsigned) {}
inline long long clock64() {
    return std::chrono::steady_clock::now().time_since_epoch().count();
}
inline size_t __cvta_generic_to_shared(const void* p) {
    return reinterpret_cast<size_t>(p);
}
