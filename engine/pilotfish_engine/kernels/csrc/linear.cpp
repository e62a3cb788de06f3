// out = x · weightᵀ + bias for few rows of x, where reading the weights once is what it costs.
//
// An output's sum runs over the inputs in the same order whatever the number of rows: a token's result has the same
// bits alone and in a batch.

#include "linear.h"

#include <algorithm>
#include <vector>

namespace {

// A block holds OUTPUTS × TOKENS sums, and the tokens' inputs, in registers: 32 of 16 floats, else 16 of 8.
constexpr int OUTPUTS = 4;

#ifdef __AVX512F__
constexpr int TOKENS = 6, WIDTH = 16;
using Wide = f32x16;

// Lane j of each quarter: the sum of that quarter's lanes of v[j]; then of all quarters.
INLINE void sum4(const Wide (&v)[OUTPUTS], float* to) {
    Wide low = __builtin_shuffle(v[0], v[1], i32x16{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}) +
               __builtin_shuffle(v[0], v[1], i32x16{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
    Wide high = __builtin_shuffle(v[2], v[3], i32x16{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}) +
                __builtin_shuffle(v[2], v[3], i32x16{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
    Wide all = __builtin_shuffle(low, high, i32x16{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
               __builtin_shuffle(low, high, i32x16{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
    all += __builtin_shuffle(all, i32x16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    all += __builtin_shuffle(all, i32x16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    std::memcpy(to, &all, OUTPUTS * sizeof(float));
}

template <class T>
INLINE Wide read(const T* from) {
    return load(from);
}
#else
constexpr int TOKENS = 3, WIDTH = 8;
using Wide = float __attribute__((vector_size(32)));
using i32x8 = int32_t __attribute__((vector_size(32)));
using u32x8 = uint32_t __attribute__((vector_size(32)));
using u16x8 = uint16_t __attribute__((vector_size(16)));

// As above, of halves.
INLINE void sum4(const Wide (&v)[OUTPUTS], float* to) {
    Wide low = __builtin_shuffle(v[0], v[1], i32x8{0, 8, 1, 9, 4, 12, 5, 13}) +
               __builtin_shuffle(v[0], v[1], i32x8{2, 10, 3, 11, 6, 14, 7, 15});
    Wide high = __builtin_shuffle(v[2], v[3], i32x8{0, 8, 1, 9, 4, 12, 5, 13}) +
                __builtin_shuffle(v[2], v[3], i32x8{2, 10, 3, 11, 6, 14, 7, 15});
    Wide all = __builtin_shuffle(low, high, i32x8{0, 1, 8, 9, 4, 5, 12, 13}) +
               __builtin_shuffle(low, high, i32x8{2, 3, 10, 11, 6, 7, 14, 15});
    all += __builtin_shuffle(all, i32x8{4, 5, 6, 7, 0, 1, 2, 3});
    std::memcpy(to, &all, OUTPUTS * sizeof(float));
}

INLINE Wide read(const float* from) {
    Wide v;
    std::memcpy(&v, from, sizeof(v));
    return v;
}
INLINE Wide read(const bfloat16* from) {
    u16x8 half;
    std::memcpy(&half, from, sizeof(half));
    return bit_cast<Wide>(__builtin_convertvector(half, u32x8) << 16);
}
#endif

template <int ROWS, class T, class Out>
INLINE void block(const Product<T, Out>& p, const float* x, int64_t token, int64_t output) {
    Wide acc[ROWS][OUTPUTS] = {};
    const T* weight = p.weight + output * p.inputs;
    for (int64_t i = 0; i < p.inputs; i += WIDTH) {
        Wide values[ROWS];
        for (int r = 0; r < ROWS; r++) values[r] = read(x + (token + r) * p.inputs + i);
        for (int n = 0; n < OUTPUTS; n++) {
            const T* at = weight + n * p.inputs + i;
            Wide w = read(at);
            if (token == 0) __builtin_prefetch(at + OUTPUTS * p.inputs, 0, 2);
            for (int r = 0; r < ROWS; r++) acc[r][n] += w * values[r];
        }
    }
    for (int r = 0; r < ROWS; r++) {
        float sums[OUTPUTS];
        sum4(acc[r], sums);
        for (int n = 0; n < OUTPUTS; n++) p.put(token + r, output + n, sums[n]);
    }
}

template <class T, class Out>
void outputs_from(const Product<T, Out>& p, const float* x, int64_t output) {
    int64_t token = 0;
    for (; token + TOKENS <= p.tokens; token += TOKENS) block<TOKENS>(p, x, token, output);
    switch (p.tokens - token) {
#ifdef __AVX512F__
        case 5: return block<5>(p, x, token, output);
        case 4: return block<4>(p, x, token, output);
        case 3: return block<3>(p, x, token, output);
#endif
        case 2: return block<2>(p, x, token, output);
        case 1: return block<1>(p, x, token, output);
    }
}

template <class T, class Out>
void linear(const Product<T, Out>& p) {
    if constexpr (std::is_same_v<T, bfloat16>)
        if (tile_linear(p)) return;
    std::vector<float> wide;
    const float* x = reinterpret_cast<const float*>(p.x);
    if constexpr (!std::is_same_v<T, float>) {
        wide.resize(size_t(p.tokens * p.inputs));
        std::transform(p.x, p.x + p.tokens * p.inputs, wide.begin(), [](T value) { return to_float(value); });
        x = wide.data();
    }
#pragma omp parallel for schedule(static)
    for (int64_t output = 0; output < p.outputs; output += OUTPUTS) outputs_from(p, x, output);
}

}  // namespace

#define DEFINE(T, Out, NAME)                                                                                           \
    EXPORT void linear_##NAME(const T* x, const T* weight, const T* bias, Out* out, int64_t tokens, int64_t inputs,    \
                              int64_t outputs) {                                                                       \
        linear<T, Out>({x, weight, bias, out, tokens, inputs, outputs});                                               \
    }

DEFINE(float, float, float32)
DEFINE(float, float, float32_to_float32)
DEFINE(bfloat16, bfloat16, bfloat16)
DEFINE(bfloat16, float, bfloat16_to_float32)
