// Attention of a ragged batch over a paged cache, causal or by a 64-bit ancestor mask, of all positions or a window.
//
// One work item is a tile of queries (tokens × the heads that share a KV head) against all rows that they see. Keys come
// in blocks of 64 that start at multiples of 64 of the request's rows, whatever the batch, and each query's sums run in
// the order of the rows: a token's result has the same bits alone, in a chunk and in a chain under verification.

#include <algorithm>
#include <vector>

#include "transpose.h"
#include "vec.h"

namespace {

constexpr int64_t BLOCK = 64;     // keys, one bit each in a query's mask of the block
constexpr int64_t MAX_ROWS = 32;  // queries of a tile
constexpr int64_t MAX_DIM = 512;
alignas(64) constexpr float ZEROS[MAX_DIM] = {};

struct Inputs {
    const int32_t *page_table, *prefix_lens, *q_indptr;
    const int64_t* tree_mask;  // null: causal
    int64_t requests, max_pages, page_size;  // page_size: a power of two
    int64_t heads, kv_heads, dim;
    int64_t window;  // of the rows that a token sees, those of its last so many positions; 0: all
    float scale;
};

struct Tile {
    int64_t request, token, tokens, kv_head;  // token: the first, of the whole pass
};

struct Scratch {
    float *q, *k, *v, *scores, *out;  // [rows, dim], [dim, BLOCK], [BLOCK, dim], [rows, BLOCK], [rows, dim]
    float peak[MAX_ROWS], total[MAX_ROWS];
};

Scratch& scratch_of_thread(int64_t dim) {
    thread_local Scratch scratch;
    thread_local std::vector<float> memory;
    size_t size = size_t(2 * MAX_ROWS * dim + 2 * BLOCK * dim + MAX_ROWS * BLOCK + LANES);
    if (memory.size() < size) memory.resize(size);
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
    scratch.q = at;
    scratch.out = at += MAX_ROWS * dim;
    scratch.k = at += MAX_ROWS * dim;
    scratch.v = at += BLOCK * dim;
    scratch.scores = at + BLOCK * dim;
    return scratch;
}

// Where a token's window begins, in the prefix at the latest if it has a mask, which is then its whole path.
INLINE int64_t first_seen(const Inputs& in, int64_t request, int64_t token) {
    if (!in.window) return 0;
    const int64_t prefix = in.prefix_lens[request];
    if (!in.tree_mask) return std::max<int64_t>(0, prefix + token - in.q_indptr[request] + 1 - in.window);
    const int64_t path = __builtin_popcountll(uint64_t(in.tree_mask[token]));
    return std::min(prefix, std::max<int64_t>(0, prefix + path - in.window));
}

// Bit j: the token sees row first + j of its request.
INLINE uint64_t block_mask(const Inputs& in, int64_t request, int64_t token, int64_t first) {
    auto below = [](int64_t n) -> uint64_t { return n <= 0 ? 0 : n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; };
    int64_t prefix = in.prefix_lens[request] - first;  // rows of the prefix from `first` on
    uint64_t seen = ~below(first_seen(in, request, token) - first);
    if (!in.tree_mask) return seen & below(prefix + token - in.q_indptr[request] + 1);
    uint64_t own = uint64_t(in.tree_mask[token]);
    if (in.window)
        for (int64_t far = __builtin_popcountll(own) - in.window; far > 0; far--) own &= own - 1;
    if (prefix >= 64) return seen;
    return prefix >= 0 ? (seen & below(prefix)) | own << prefix : prefix > -64 ? own >> -prefix : 0;
}

#ifdef __AVX512F__
// 16 rows of `dim` become the first 16 places of `dim` rows of BLOCK floats.
INLINE void columns_of(const float* const* rows, float* to, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES) {
        f32x16 lines[LANES];
        for (int i = 0; i < LANES; i++) lines[i] = load(rows[i] + d);
        transpose(lines);
        for (int i = 0; i < LANES; i++) store(to + (d + i) * BLOCK, lines[i]);
    }
}
INLINE void columns_of(const bfloat16* const* rows, float* to, int64_t dim) {
    int64_t d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {  // pairs of neighbours move as one
        f32x16 pairs[LANES];
        for (int i = 0; i < LANES; i++) std::memcpy(&pairs[i], rows[i] + d, sizeof(f32x16));
        transpose(pairs);
        for (int i = 0; i < LANES; i++) {
            u32x16 both = bit_cast<u32x16>(pairs[i]);
            store(to + (d + 2 * i) * BLOCK, bit_cast<f32x16>(both << 16));
            store(to + (d + 2 * i + 1) * BLOCK, bit_cast<f32x16>(both & 0xffff0000u));
        }
    }
    for (; d < dim; d += LANES) {
        f32x16 lines[LANES];
        for (int i = 0; i < LANES; i++) lines[i] = load(rows[i] + d);
        transpose(lines);
        for (int i = 0; i < LANES; i++) store(to + (d + i) * BLOCK, lines[i]);
    }
}
#else
template <class T>
INLINE void columns_of(const T* const* rows, float* to, int64_t dim) {
    for (int64_t d = 0; d < dim; d++)
        for (int64_t i = 0; i < LANES; i++) to[d * BLOCK + i] = to_float(rows[i][d]);
}
#endif

// Keys to columns, values to rows, both to float.
template <class T>
INLINE void pack(const T* const (&keys)[BLOCK], const T* const (&values)[BLOCK], int64_t count, int64_t dim, Scratch& s) {
    for (int64_t j = 0; j < count; j += LANES) columns_of(keys + j, s.k + j, dim);
    for (int64_t j = 0; j < count; j++)
        for (int64_t d = 0; d < dim; d += LANES) store(s.v + j * dim + d, load(values[j] + d));
}

// scores[r][0 … 16·VECTORS) = scale · q[r] · keys, for ROWS queries.
template <int ROWS, int VECTORS>
INLINE void score(const float* q, const float* k, float* scores, int64_t dim, float scale) {
    f32x16 acc[ROWS][VECTORS] = {};
    for (int64_t d = 0; d < dim; d++) {
        f32x16 key[VECTORS];
        for (int c = 0; c < VECTORS; c++) key[c] = load(k + d * BLOCK + c * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < VECTORS; c++) acc[r][c] += q[r * dim + d] * key[c];
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < VECTORS; c++) store(scores + r * BLOCK + c * LANES, acc[r][c] * scale);
}

template <int ROWS>
INLINE void score_block(const float* q, const float* k, float* scores, int64_t keys, int64_t dim, float scale) {
    if (keys > 48) return score<ROWS, 4>(q, k, scores, dim, scale);
    if (keys > 32) return score<ROWS, 3>(q, k, scores, dim, scale);
    if (keys > 16) return score<ROWS, 2>(q, k, scores, dim, scale);
    score<ROWS, 1>(q, k, scores, dim, scale);
}

// One query's scores become weights against its running peak; returns what its sums so far are to be multiplied by.
INLINE float soften(float* scores, uint64_t mask, int64_t keys, float& peak, float& total) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 seen[BLOCK / LANES], high = splat(NEG_INF);
    const int64_t vectors = (keys + LANES - 1) / LANES;
    for (int64_t c = 0; c < vectors; c++) {
        i32x16 bits = (i32x16{} + int32_t(mask >> (c * LANES) & 0xffff)) >> lane & 1;
        seen[c] = bits != 0 ? load(scores + c * LANES) : splat(NEG_INF);
        high = max(high, seen[c]);
    }
    float next = std::max(peak, max(high));
    if (next == NEG_INF) {
        for (int64_t c = 0; c < vectors; c++) store(scores + c * LANES, f32x16{});
        return 1.0f;
    }
    f32x16 sums = {};
    for (int64_t c = 0; c < vectors; c++) {
        f32x16 weight = exp_of(seen[c] - next);
        weight = seen[c] == NEG_INF ? f32x16{} : weight;
        store(scores + c * LANES, weight);
        sums += weight;
    }
    float correction = peak == NEG_INF ? 0.0f : exp_of(peak - next);
    total = total * correction + sum(sums);
    peak = next;
    return correction;
}

// out[r] = out[r] · correction[r] + weights[r] · values, for ROWS queries and 16·VECTORS dimensions.
template <int ROWS, int VECTORS>
INLINE void gather(const float* weights, const float* v, float* out, const float* correction, int64_t keys, int64_t dim) {
    f32x16 acc[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < VECTORS; c++) acc[r][c] = load(out + r * dim + c * LANES) * correction[r];
    for (int64_t j = 0; j < keys; j++) {
        f32x16 value[VECTORS];
        for (int c = 0; c < VECTORS; c++) value[c] = load(v + j * dim + c * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < VECTORS; c++) acc[r][c] += weights[r * BLOCK + j] * value[c];
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < VECTORS; c++) store(out + r * dim + c * LANES, acc[r][c]);
}

template <int ROWS>
INLINE void attend_rows(Scratch& s, int64_t row, const uint64_t* masks, int64_t keys, int64_t dim, float scale) {
    float* scores = s.scores + row * BLOCK;
    float* out = s.out + row * dim;
    float correction[ROWS];
    score_block<ROWS>(s.q + row * dim, s.k, scores, keys, dim, scale);
    for (int r = 0; r < ROWS; r++)
        correction[r] = soften(scores + r * BLOCK, masks[row + r], keys, s.peak[row + r], s.total[row + r]);
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) gather<ROWS, 4>(scores, s.v + d, out + d, correction, keys, dim);
    for (; d < dim; d += LANES) gather<ROWS, 1>(scores, s.v + d, out + d, correction, keys, dim);
}

void attend_block(Scratch& s, int64_t rows, const uint64_t* masks, int64_t keys, int64_t dim, float scale) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) attend_rows<4>(s, row, masks, keys, dim, scale);
    if (rows - row == 3) attend_rows<3>(s, row, masks, keys, dim, scale);
    if (rows - row == 2) attend_rows<2>(s, row, masks, keys, dim, scale);
    if (rows - row == 1) attend_rows<1>(s, row, masks, keys, dim, scale);
}

// Where one request's rows lie in a cache.
struct Rows {
    const int32_t* pages;
    int64_t page_size, stride, offset;  // stride: of a slot, offset: of the KV head, in elements
    int shift;

    INLINE int64_t at(int64_t row) const {
        return ((int64_t(pages[row >> shift]) << shift | (row & (page_size - 1))) * stride) + offset;
    }
};

template <class T>
INLINE void fetch_ahead(const Rows& rows, const T* k_cache, const T* v_cache, int64_t first, int64_t end, int64_t dim) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t row = first; row < std::min(first + BLOCK, end); row++) {
        const int64_t at = rows.at(row);
        for (int64_t d = 0; d < dim; d += LINE) {
            __builtin_prefetch(k_cache + at + d, 0, 2);
            __builtin_prefetch(v_cache + at + d, 0, 2);
        }
    }
}

template <class T>
void attend_tile(const Inputs& in, const Tile& tile, const T* q, const T* k_cache, const T* v_cache, T* out) {
    const int64_t dim = in.dim, group = in.heads / in.kv_heads, rows = tile.tokens * group;
    Scratch& s = scratch_of_thread(dim);
    auto query_at = [&](int64_t row) {  // row: token-major, then head of the group
        return ((tile.token + row / group) * in.heads + tile.kv_head * group + row % group) * dim;
    };
    for (int64_t row = 0; row < rows; row++) {
        s.peak[row] = NEG_INF;
        s.total[row] = 0;
        for (int64_t d = 0; d < dim; d += LANES) {
            store(s.q + row * dim + d, load(q + query_at(row) + d));
            store(s.out + row * dim + d, f32x16{});
        }
    }
    const int64_t begin = in.q_indptr[tile.request], prefix = in.prefix_lens[tile.request];
    const int64_t last = in.tree_mask ? in.q_indptr[tile.request + 1] : tile.token + tile.tokens;
    const int64_t end = prefix + (last - begin);
    const Rows request_rows = {in.page_table + tile.request * in.max_pages, in.page_size, in.kv_heads * dim,
                               tile.kv_head * dim, __builtin_ctzll(uint64_t(in.page_size))};
    int64_t start = end;
    for (int64_t t = 0; t < tile.tokens; t++) start = std::min(start, first_seen(in, tile.request, tile.token + t));
    start = start / BLOCK * BLOCK;
    fetch_ahead(request_rows, k_cache, v_cache, start, prefix, dim);
    for (int64_t first = start; first < end; first += BLOCK) {
        uint64_t masks[MAX_ROWS], any = 0;
        for (int64_t t = 0; t < tile.tokens; t++) {
            uint64_t mask = block_mask(in, tile.request, tile.token + t, first);
            any |= mask;
            for (int64_t g = 0; g < group; g++) masks[t * group + g] = mask;
        }
        if (!any) continue;
        fetch_ahead(request_rows, k_cache, v_cache, first + BLOCK, prefix, dim);
        const int64_t keys = std::min(BLOCK, int64_t(64 - __builtin_clzll(any)));
        const T *key_rows[BLOCK], *value_rows[BLOCK];
        for (int64_t j = 0; j < BLOCK; j++) {  // what no query of the tile sees is not read: zeros stand for it
            const bool is_seen = any >> j & 1;
            const int64_t at = is_seen ? request_rows.at(first + j) : 0;
            key_rows[j] = is_seen ? k_cache + at : reinterpret_cast<const T*>(ZEROS);
            value_rows[j] = is_seen ? v_cache + at : reinterpret_cast<const T*>(ZEROS);
        }
        pack(key_rows, value_rows, keys, dim, s);
        attend_block(s, rows, masks, keys, dim, in.scale);
    }
    for (int64_t row = 0; row < rows; row++) {
        const float scale = s.total[row] > 0 ? 1.0f / s.total[row] : 0.0f;
        for (int64_t d = 0; d < dim; d += LANES)
            store(out + query_at(row) + d, load(s.out + row * dim + d) * scale);
    }
}

template <class T>
void paged_attention(const Inputs& in, const T* q, const T* k_cache, const T* v_cache, T* out, int64_t tokens) {
    const int64_t tile_tokens = std::max<int64_t>(1, MAX_ROWS / (in.heads / in.kv_heads));
    std::vector<Tile> tiles;
    for (int64_t b = 0; b < in.requests; b++)
        for (int64_t token = in.q_indptr[b]; token < in.q_indptr[b + 1]; token += tile_tokens)
            for (int64_t head = 0; head < in.kv_heads; head++)
                tiles.push_back({b, token, std::min(tile_tokens, in.q_indptr[b + 1] - token), head});
    const int64_t count = int64_t(tiles.size());
#pragma omp parallel for schedule(dynamic, 1) if (count > 1)
    for (int64_t i = count - 1; i >= 0; i--) attend_tile(in, tiles[size_t(i)], q, k_cache, v_cache, out);
    const int64_t width = in.heads * in.dim, used = in.q_indptr[in.requests];
    std::fill(out + used * width, out + tokens * width, T{});  // padding
}

}  // namespace

#define DEFINE(T, NAME)                                                                                                \
    EXPORT void window_attention_##NAME(const T* q, const T* k_cache, const T* v_cache, T* out,                        \
                                        const int32_t* page_table, const int32_t* prefix_lens,                        \
                                        const int32_t* q_indptr, const int64_t* tree_mask, int64_t tokens,             \
                                        int64_t requests, int64_t max_pages, int64_t page_size, int64_t heads,         \
                                        int64_t kv_heads, int64_t dim, int64_t window, float scale) {                  \
        paged_attention<T>({page_table, prefix_lens, q_indptr, tree_mask, requests, max_pages, page_size, heads,       \
                            kv_heads, dim, window, scale},                                                             \
                           q, k_cache, v_cache, out, tokens);                                                          \
    }                                                                                                                  \
    EXPORT void paged_attention_##NAME(const T* q, const T* k_cache, const T* v_cache, T* out,                         \
                                       const int32_t* page_table, const int32_t* prefix_lens,                         \
                                       const int32_t* q_indptr, const int64_t* tree_mask, int64_t tokens,              \
                                       int64_t requests, int64_t max_pages, int64_t page_size, int64_t heads,          \
                                       int64_t kv_heads, int64_t dim, float scale) {                                   \
        window_attention_##NAME(q, k_cache, v_cache, out, page_table, prefix_lens, q_indptr, tree_mask, tokens,        \
                                requests, max_pages, page_size, heads, kv_heads, dim, 0, scale);                       \
    }

DEFINE(float, float32)
DEFINE(bfloat16, bfloat16)
