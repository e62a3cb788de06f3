// One product of a batch with a matrix, and the way through the CPU's matrix tiles where it has them.
#pragma once

#include <type_traits>

#include "vec.h"

template <class T, class Out>
struct Product {
    const T *x, *weight, *bias;  // [tokens, inputs], [outputs, inputs], [outputs] or null
    Out* out;                    // [tokens, outputs]
    int64_t tokens, inputs, outputs;

    INLINE void put(int64_t token, int64_t output, float sum) const {
        out[token * outputs + output] = from_float<Out>(bias ? sum + to_float(bias[output]) : sum);
    }
};

// False, and nothing done, where the CPU has no tiles or the shape does not fill them.
bool tile_linear(const Product<bfloat16, bfloat16>& product);
bool tile_linear(const Product<bfloat16, float>& product);
