// Half precision, in place of the CUDA toolkit's header of this name.
#pragma once
#include "emulation/vectors.h"

struct __half_raw {
    unsigned short x;
};

struct alignas(2) __half {
    __half() = default;
    __half(float value) : value(static_cast<_Float16>(value)) {}
    __half(double value) : value(static_cast<_Float16>(value)) {}
    __half(int value) : value(static_cast<_Float16>(value)) {}
    __half(__half_raw raw) : value(__builtin_bit_cast(_Float16, raw.x)) {}
    explicit __half(_Float16 value) : value(value) {}
    operator float() const { return static_cast<float>(value); }
    operator __half_raw() const { return {__builtin_bit_cast(unsigned short, value)}; }

  private:
    _Float16 value;
};
using half = __half;

struct alignas(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half x, __half y) : x(x), y(y) {}
};
using half2 = __half2;

inline float __half2float(__half x) {
    return static_cast<float>(x);
}
inline __half __float2half(float x) {
    return __half(x);
}
inline __half __float2half_rn(float x) {
    return __half(x);
}
inline __half __int2half_rn(int x) {
    return __half(x);
}
inline __half __ushort_as_half(unsigned short x) {
    return __half(__half_raw{x});
}
inline __half __short_as_half(short x) {
    return __half(__half_raw{static_cast<unsigned short>(x)});
}
inline unsigned short __half_as_ushort(__half x) {
    return static_cast<__half_raw>(x).x;
}
inline short __half_as_short(__half x) {
    return static_cast<short>(__half_as_ushort(x));
}

inline __half2 __halves2half2(__half x, __half y) {
    return {x, y};
}
inline __half2 make_half2(__half x, __half y) {
    return {x, y};
}
inline __half2 __half2half2(__half x) {
    return {x, x};
}
inline __half2 __float2half2_rn(float x) {
    return {__half(x), __half(x)};
}
inline __half2 __floats2half2_rn(float x, float y) {
    return {__half(x), __half(y)};
}
inline __half2 __float22half2_rn(float2 v) {
    return {__half(v.x), __half(v.y)};
}
inline float2 __half22float2(__half2 v) {
    return {static_cast<float>(v.x), static_cast<float>(v.y)};
}
inline float __low2float(__half2 v) {
    return static_cast<float>(v.x);
}
inline float __high2float(__half2 v) {
    return static_cast<float>(v.y);
}
inline __half __low2half(__half2 v) {
    return v.x;
}
inline __half __high2half(__half2 v) {
    return v.y;
}

// A float sum or product of halves, rounded again, is the correctly rounded one.
inline __half __hadd(__half a, __half b) {
    return __half(static_cast<float>(a) + static_cast<float>(b));
}
inline __half __hsub(__half a, __half b) {
    return __half(static_cast<float>(a) - static_cast<float>(b));
}
inline __half __hmul(__half a, __half b) {
    return __half(static_cast<float>(a) * static_cast<float>(b));
}
inline __half __hfma(__half a, __half b, __half c) {
    return __half(__builtin_fma(static_cast<double>(static_cast<float>(a)), static_cast<double>(static_cast<float>(b)),
                                static_cast<double>(static_cast<float>(c))));
}
inline __half2 __hadd2(__half2 a, __half2 b) {
    return {__hadd(a.x, b.x), __hadd(a.y, b.y)};
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    return {__hsub(a.x, b.x), __hsub(a.y, b.y)};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
    return {__hmul(a.x, b.x), __hmul(a.y, b.y)};
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
