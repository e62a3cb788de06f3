// Norms, rotation and gate: one pass over each row, sums in float32.

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 14;  // elements; below, waking a thread costs more than it saves

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) squares += to_float(x[i]) * to_float(x[i]);
    float scale = 1.0f / std::sqrt(squares / float(width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = from_float<T>(to_float(x[i]) * scale * to_float(weight[i]));
}

template <class T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * width >= PARALLEL_FROM)
    for (int64_t row = 0; row < rows; row++) {
        const T* normed = x + row * width;
        if (residual) {
            T* sum = residual + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) sum[i] = from_float<T>(to_float(sum[i]) + to_float(normed[i]));
            normed = sum;
        }
        norm_row(normed, weight, out + row * width, width, eps);
    }
}

template <class T>
void rotate(const T* from, T* to, const float* cos, const float* sin, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float first = to_float(from[i]), second = to_float(from[i + half]);
        to[i] = from_float<T>(first * cos[i] - second * sin[i]);
        to[i + half] = from_float<T>(second * cos[i] + first * sin[i]);
    }
}

template <class T>
void rope_and_write(const T* qkv, const int64_t* positions, const float* cos_sin, const int64_t* slots, T* q, T* k_cache,
                    T* v_cache, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim) {
    const int64_t half = dim / 2, row = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for schedule(static) if (tokens > 1 && tokens * row >= PARALLEL_FROM)
    for (int64_t n = 0; n < tokens; n++) {
        const float* cos = cos_sin + positions[n] * dim;
        const float* sin = cos + half;
        const T* from = qkv + n * row;
        T* k = k_cache + slots[n] * kv_heads * dim;
        for (int64_t h = 0; h < heads; h++) rotate(from + h * dim, q + (n * heads + h) * dim, cos, sin, half);
        from += heads * dim;
        for (int64_t h = 0; h < kv_heads; h++) rotate(from + h * dim, k + h * dim, cos, sin, half);
        std::copy_n(from + kv_heads * dim, kv_heads * dim, v_cache + slots[n] * kv_heads * dim);
    }
}

template <class T>
void silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * width >= PARALLEL_FROM)
    for (int64_t row = 0; row < rows; row++) {
        const T* gate = gate_up + row * 2 * width;
        const T* up = gate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float x = to_float(gate[i]);
            out[row * width + i] = from_float<T>(x / (1.0f + exp_of(-x)) * to_float(up[i]));
        }
    }
}

}  // namespace

#define DEFINE(T, NAME)                                                                                                \
    EXPORT void rms_norm_##NAME(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t width,         \
                                float eps) {                                                                           \
        rms_norm(x, residual, weight, out, rows, width, eps);                                                          \
    }                                                                                                                  \
    EXPORT void rope_and_write_##NAME(const T* qkv, const int64_t* positions, const float* cos_sin,                    \
                                      const int64_t* slots, T* q, T* k_cache, T* v_cache, int64_t tokens,              \
                                      int64_t heads, int64_t kv_heads, int64_t dim) {                                  \
        rope_and_write(qkv, positions, cos_sin, slots, q, k_cache, v_cache, tokens, heads, kv_heads, dim);             \
    }                                                                                                                  \
    EXPORT void silu_and_mul_##NAME(const T* gate_up, T* out, int64_t rows, int64_t width) {                           \
        silu_and_mul(gate_up, out, rows, width);                                                                       \
    }

DEFINE(float, float32)
DEFINE(bfloat16, bfloat16)
