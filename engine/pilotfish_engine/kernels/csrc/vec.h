// Sixteen floats at a time, on whatever registers the build targets, and bfloat16 beside float.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

struct bfloat16 {
    uint16_t bits;
};

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

constexpr int LANES = 16;
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

template <class To, class From>
INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bfloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

template <class T>
INLINE T from_float(float x);
template <>
INLINE float from_float<float>(float x) {
    return x;
}
template <>
INLINE bfloat16 from_float<bfloat16>(float x) {  // to nearest, ties to even
    uint32_t bits = bit_cast<uint32_t>(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x == x ? rounded : 0x7fc0)};
}

INLINE f32x16 splat(float x) { return x - f32x16{}; }

INLINE f32x16 load(const float* from) {
    f32x16 v;
    std::memcpy(&v, from, sizeof(v));
    return v;
}
INLINE f32x16 load(const bfloat16* from) {
    u16x16 half;
    std::memcpy(&half, from, sizeof(half));
#ifdef __AVX512F__
    return bit_cast<f32x16>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bit_cast<__m256i>(half)), 16));
#else
    return bit_cast<f32x16>(__builtin_convertvector(half, u32x16) << 16);
#endif
}
INLINE void store(float* to, f32x16 v) { std::memcpy(to, &v, sizeof(v)); }
INLINE void store(bfloat16* to, f32x16 v) {
    u32x16 bits = bit_cast<u32x16>(v);
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = v == v ? rounded : (u32x16{} + 0x7fc0);
#ifdef __AVX512F__
    u16x16 half = bit_cast<u16x16>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(rounded)));
#else
    u16x16 half = __builtin_convertvector(rounded, u16x16);
#endif
    std::memcpy(to, &half, sizeof(half));
}

template <class F>
INLINE float fold(f32x16 v, F combine) {
    v = combine(v, __builtin_shuffle(v, i32x16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = combine(v, __builtin_shuffle(v, i32x16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = combine(v, __builtin_shuffle(v, i32x16{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = combine(v, __builtin_shuffle(v, i32x16{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}
INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
INLINE float sum(f32x16 v) {
    return fold(v, [](f32x16 a, f32x16 b) __attribute__((always_inline)) { return a + b; });
}
INLINE float max(f32x16 v) {
    return fold(v, [](f32x16 a, f32x16 b) __attribute__((always_inline)) { return max(a, b); });
}

// e^x to 2 ulp for x in [-87, 88]; beyond, the value at the bound. V: float or f32x16; I: the integer of its width.
template <class V, class I>
INLINE V exp_poly(V x) {
    x = x < -87.0f ? V{} - 87.0f : x;
    x = x > 88.0f ? V{} + 88.0f : x;
    V shifted = x * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: the sum's low bits hold the rounded integer
    V n = shifted - 12582912.0f;
    V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return bit_cast<V>(bit_cast<I>(p) + (bit_cast<I>(shifted) << 23));
}
INLINE float exp_of(float x) { return exp_poly<float, int32_t>(x); }
INLINE f32x16 exp_of(f32x16 x) { return exp_poly<f32x16, i32x16>(x); }
