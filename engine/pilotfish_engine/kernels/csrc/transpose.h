// 16 × 16 values of 32 bits, rows to columns, in registers.
#pragma once

#include "vec.h"

#ifdef __AVX512F__
INLINE void transpose(f32x16 (&r)[16]) {
    auto exchange = [&](int distance, i32x16 low, i32x16 high) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (!(i & distance)) {
                f32x16 a = r[i], b = r[i + distance];
                r[i] = __builtin_shuffle(a, b, low);
                r[i + distance] = __builtin_shuffle(a, b, high);
            }
    };
    exchange(8, i32x16{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
             i32x16{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    exchange(4, i32x16{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
             i32x16{4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
    exchange(2, i32x16{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
             i32x16{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
    exchange(1, i32x16{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
             i32x16{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
}
#endif
