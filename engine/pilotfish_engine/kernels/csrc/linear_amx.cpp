// The product on AMX tiles: 16 outputs × 32 inputs of weights, as they lie in memory, times 16 tokens.

#include "linear.h"

#ifdef __AVX512F__

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "transpose.h"

namespace {

#define AMX __attribute__((target("amx-tile,amx-bf16")))

constexpr int64_t INPUTS = 32;   // of a tile
constexpr int64_t OUTPUTS = 32;  // of a unit of work: two tiles
constexpr int64_t TILE = LANES * LANES;

bool has_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Every tile: 16 rows of 64 bytes.
AMX void configure_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    std::fill_n(config.row_bytes, 8, uint16_t(64));
    std::fill_n(config.rows, 8, uint8_t(16));
    _tile_loadconfig(&config);
}

// [token tile][input tile][16 pairs of inputs][16 tokens], pairs of 32 bits; rows past the last token are zero.
void pack(const bfloat16* x, int64_t tokens, int64_t inputs, float* to) {
    for (int64_t token = 0; token < tokens; token += LANES)
        for (int64_t i = 0; i < inputs; i += INPUTS, to += TILE) {
            f32x16 pairs[LANES];
            for (int64_t r = 0; r < LANES; r++) {
                pairs[r] = f32x16{};
                if (token + r < tokens) std::memcpy(&pairs[r], x + (token + r) * inputs + i, sizeof(f32x16));
            }
            transpose(pairs);
            for (int64_t r = 0; r < LANES; r++) store(to + r * LANES, pairs[r]);
        }
}

// sums: [16 outputs][16 tokens].
template <class Out>
void put(const Product<bfloat16, Out>& p, const float* sums, int64_t token, int64_t output) {
    f32x16 rows[LANES];
    for (int64_t r = 0; r < LANES; r++) rows[r] = load(sums + r * LANES);
    transpose(rows);
    f32x16 bias = p.bias ? load(p.bias + output) : f32x16{};
    for (int64_t r = 0; r < std::min<int64_t>(LANES, p.tokens - token); r++)
        store(p.out + (token + r) * p.outputs + output, p.bias ? rows[r] + bias : rows[r]);
}

template <class Out>
AMX void unit_of_one(const Product<bfloat16, Out>& p, const float* x, int64_t token, int64_t output) {
    alignas(64) float sums[2 * TILE];
    const bfloat16* weight = p.weight + output * p.inputs;
    const int64_t stride = p.inputs * int64_t(sizeof(bfloat16));
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < p.inputs; i += INPUTS) {
        _tile_loadd(6, x + i * LANES / 2, 64);
        _tile_loadd(4, weight + i, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weight + LANES * p.inputs + i, stride);
        _tile_dpbf16ps(1, 5, 6);
        if (token == 0)  // the next unit's weights follow these
            for (int64_t line = 0; line < OUTPUTS; line++)
                __builtin_prefetch(weight + OUTPUTS * p.inputs + i * OUTPUTS + line * INPUTS, 0, 2);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE, 64);
    put(p, sums, token, output);
    put(p, sums + TILE, token, output + LANES);
}

template <class Out>
AMX void unit_of_two(const Product<bfloat16, Out>& p, const float* x, int64_t token, int64_t output) {
    alignas(64) float sums[4 * TILE];
    const bfloat16* weight = p.weight + output * p.inputs;
    const int64_t stride = p.inputs * int64_t(sizeof(bfloat16));
    const float* second = x + p.inputs * LANES / 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < p.inputs; i += INPUTS) {
        _tile_loadd(6, x + i * LANES / 2, 64);
        _tile_loadd(4, weight + i, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weight + LANES * p.inputs + i, stride);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, second + i * LANES / 2, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
        if (token == 0)
            for (int64_t line = 0; line < OUTPUTS; line++)
                __builtin_prefetch(weight + OUTPUTS * p.inputs + i * OUTPUTS + line * INPUTS, 0, 2);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE, 64);
    _tile_stored(2, sums + 2 * TILE, 64);
    _tile_stored(3, sums + 3 * TILE, 64);
    put(p, sums, token, output);
    put(p, sums + TILE, token, output + LANES);
    put(p, sums + 2 * TILE, token + LANES, output);
    put(p, sums + 3 * TILE, token + LANES, output + LANES);
}

template <class Out>
AMX void units(const Product<bfloat16, Out>& p, const float* x) {
#pragma omp parallel
    {
        configure_tiles();
#pragma omp for schedule(static)
        for (int64_t output = 0; output < p.outputs; output += OUTPUTS) {
            int64_t token = 0;
            for (; token + LANES < p.tokens; token += 2 * LANES)
                unit_of_two(p, x + token * p.inputs / 2, token, output);
            if (token < p.tokens) unit_of_one(p, x + token * p.inputs / 2, token, output);
        }
        _tile_release();
    }
}

template <class Out>
bool multiply(const Product<bfloat16, Out>& p) {
    static const bool is_able = has_tiles();
    if (!is_able || p.inputs % INPUTS || p.outputs % OUTPUTS) return false;
    const size_t tiles = size_t((p.tokens + LANES - 1) / LANES * p.inputs / INPUTS);
    thread_local std::unique_ptr<float[]> memory;
    thread_local size_t capacity = 0;
    if (capacity < tiles) {
        memory = std::make_unique<float[]>((tiles + 1) * TILE);
        capacity = tiles;
    }
    float* x = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t(63));
    pack(p.x, p.tokens, p.inputs, x);
    units(p, x);
    return true;
}

}  // namespace

bool tile_linear(const Product<bfloat16, bfloat16>& product) { return multiply(product); }
bool tile_linear(const Product<bfloat16, float>& product) { return multiply(product); }

#else

bool tile_linear(const Product<bfloat16, bfloat16>&) { return false; }
bool tile_linear(const Product<bfloat16, float>&) { return false; }

#endif
