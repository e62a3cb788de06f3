"""Attention over a paged cache in one kernel: plain decoding, trees, prompt chunks and windows.

A program attends a tile of queries (consecutive tokens of one request, each with the heads that share a KV head) to a
split of the rows that any of them sees. Masks are computed only in blocks where the tile's tokens differ in what they
see. Where rows are split among programs, a second kernel merges what they found by its log-sum-exp (Flash-Decoding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish_engine.kernels.cuda import early
from pilotfish_engine.kernels.cuda.early import await_others
from pilotfish_engine.kernels.inputs import AttentionInputs

MAX_DIM = 256  # of a head; the products take at least 16 of each side, so less is padded
MAX_GROUP = 64  # query heads for a KV head
MAX_ROWS = 128  # queries of a tile
PROGRAMS = 3 * 132  # as many as run at once on an H200: splitting the rows further gains nothing
LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)  # below every score, and finite: differences of it are no NaN
WAYS = tl.constexpr(128)


@triton.jit
def _owner(tile, q_indptr, num_requests, TOKENS: tl.constexpr):
    """The request that a tile belongs to; num_requests: padding.

    A request r has its first tile at q_indptr[r] // TOKENS + r, which leaves each enough of them. Searched WAYS at a
    time: one load for up to as many requests, two for up to their square.
    """
    first = tl.full([], 0, tl.int32)
    count = num_requests + 1
    while count > 1:
        step = tl.cdiv(count, WAYS)
        ahead = tl.arange(0, WAYS) * step
        request = first + ahead
        inside = ahead < count
        begin = tl.load(q_indptr + request, mask=inside, other=0) // TOKENS + request
        passed = (tl.sum((inside & (begin <= tile)).to(tl.int32), 0) - 1) * step
        first += passed
        count = tl.minimum(step, count - passed)
    return first


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _bits(x):
    """How many bits of an int64 are set."""
    x = x.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _sees(own, path, depth, window, TREE: tl.constexpr, WINDOW: tl.constexpr):
    """Whether tokens of these paths and depths [ROWS, 1] see the rows prefix + own [1, BLOCK]: see visible_rows."""
    if TREE:
        node = tl.minimum(tl.maximum(own, 0), 63)
        sees = (own < 0) | ((own < 64) & (((path >> node) & 1) != 0))
    else:
        sees = own <= depth
    if WINDOW:
        if TREE:
            above = 63 - node  # shifted out: the bits past the row's own
            sees = sees & (tl.where(own < 0, own, _bits(path << above) - 1) > depth - window)
        else:
            sees = sees & (own > depth - window)
    return sees


@triton.jit
def _extent(
    tree_mask, token, number, is_query, prefix, window,
    TREE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Of a tile's tokens: paths, what is in any of them, depths; low, clear_low, clear_end and end: rows that any of
    them sees lie in low … end-1, and all see all of clear_low … clear_end-1."""
    if TREE:
        path = tl.load(tree_mask + token, mask=is_query, other=0)
        reach = tl.reduce(path, 0, _either)
        node = tl.arange(0, 64)
        end = prefix + tl.max(tl.where(((reach >> node) & 1) != 0, node + 1, 0), 0)
        clear_end = prefix
        depth = _bits(path) - 1
    else:
        path = number
        reach = 0
        end = prefix + tl.max(tl.where(is_query, number, 0), 0) + 1
        clear_end = prefix + tl.min(number, 0) + 1
        depth = number
    low = 0
    clear_low = 0
    if WINDOW:
        low = tl.maximum(prefix + tl.min(tl.where(is_query, depth, 1 << 30), 0) - window + 1, 0)
        clear_low = prefix + tl.max(tl.where(is_query, depth, -1), 0) - window + 1
    return path, reach, depth, low, clear_low, clear_end, end


@triton.jit
def _fold(scores, values, top, total, mean):
    """One block into the running maximum, the sum of powers of two below it and the values weighed by them."""
    higher = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[:, None])
    mean = tl.dot(weight.to(values.dtype), values, mean * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weight, 1), mean


@triton.jit
def _read(
    queries, k_cache, v_cache, pages, head, d, prefix, path, reach, depth, window, base, end, low, clear_low, clear_end,
    scale, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention to rows base … end-1, block by block. The next block's pages are looked up a block ahead: the copies,
    which are many blocks ahead, never wait for them."""
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDTH], tl.float32)
    row = base + tl.arange(0, BLOCK)
    page = tl.load(pages + row // PAGE, mask=row < end, other=0)
    for start in tl.range(base, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        own = row - prefix
        is_read = (row < end) & (row >= low)
        if TREE:
            is_read = is_read & ((own < 0) | (((reach >> tl.minimum(tl.maximum(own, 0), 63)) & 1) != 0))
        place = ((page.to(tl.int64) * PAGE + row % PAGE) * KV_HEADS + head) * DIM
        is_there = is_read[:, None] & (d < DIM)[None, :]
        keys = tl.load(k_cache + place[:, None] + d[None, :], mask=is_there, other=0.0)
        values = tl.load(v_cache + place[:, None] + d[None, :], mask=is_there, other=0.0)
        page = tl.load(pages + (row + BLOCK) // PAGE, mask=row + BLOCK < end, other=0)
        scores = tl.dot(queries, keys.T, input_precision="ieee") * scale
        if (start + BLOCK > clear_end) | (start < clear_low):
            sees = _sees(own[None, :], path[:, None], depth[:, None], window, TREE, WINDOW)
            scores = tl.where(is_read[None, :] & sees, scores, float("-inf"))
        top, total, mean = _fold(scores, values, top, total, mean)
    return top, total, mean


@triton.jit(
    do_not_specialize=["window", "num_tokens", "num_requests", "max_pages", "num_tiles", "splits"],
    do_not_specialize_on_alignment=["page_table", "prefix_lens", "q_indptr", "tree_mask"],
)
def _attend(
    q, k_cache, v_cache, out, parts, weights, page_table, prefix_lens, q_indptr, tree_mask,
    scale, window, num_tokens, num_requests, max_pages, num_tiles, splits,
    PAGE: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // GROUP
    await_others(EARLY)
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS % splits
    tile = num_tiles - 1 - tl.program_id(0) // KV_HEADS // splits  # a long chunk's last tiles see most: they go first
    request = _owner(tile, q_indptr, num_requests, TOKENS)
    is_real = request < num_requests
    begin = tl.load(q_indptr + request)
    count = tl.load(q_indptr + request + 1, mask=is_real, other=num_tokens) - begin
    first = (tile - begin // TOKENS - request) * TOKENS
    if first >= count:
        return
    lane = tl.arange(0, ROWS)
    number = first + lane // GROUP  # of the token in its request
    is_query = (lane < TOKENS * GROUP) & (number < count)
    token = begin + number
    prefix = tl.load(prefix_lens + request, mask=is_real, other=0)
    path, reach, depth, low, clear_low, clear_end, end = _extent(
        tree_mask, token, number, is_query, prefix, window, TREE, WINDOW
    )
    end = tl.where(is_real, tl.minimum(end, max_pages * PAGE), 0)
    base = low // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(end - base, BLOCK), splits) * BLOCK
    base += split * share
    end = tl.minimum(end, base + share)

    d = tl.arange(0, WIDTH)
    query = (token.to(tl.int64) * KV_HEADS + head) * GROUP + lane % GROUP
    is_number = is_query[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + query[:, None] * DIM + d[None, :], mask=is_number, other=0.0)
    top, total, mean = _read(
        queries, k_cache, v_cache, page_table + request.to(tl.int64) * max_pages, head, d,
        prefix, path, reach, depth, window, base, end, low, clear_low, clear_end, scale,
        PAGE, KV_HEADS, DIM, ROWS, WIDTH, BLOCK, TREE, WINDOW,
    )  # fmt: skip
    saw = total > 0
    total = tl.where(saw, total, 1.0)
    mean = mean / total[:, None]
    if SPLIT:
        query = query * splits + split
        tl.store(weights + query, tl.where(saw, top + tl.log2(total), float("-inf")), mask=is_query)
        if base < end:
            tl.store(parts + query[:, None] * DIM + d[None, :], mean, mask=is_number)
    else:
        tl.store(out + query[:, None] * DIM + d[None, :], mean.to(out.dtype.element_ty), mask=is_number)


@triton.jit
def _merge(
    parts, weights, out, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    await_others(EARLY)
    query = tl.program_id(0).to(tl.int64)
    part = query * SPLITS + tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    weight = tl.load(weights + part)
    is_there = (weight > float("-inf"))[:, None] & (d < DIM)[None, :]
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0), LOWEST))
    total = tl.sum(weight, 0)
    mean = tl.sum(tl.load(parts + part[:, None] * DIM + d[None, :], mask=is_there, other=0.0) * weight[:, None], 0)
    mean = mean / tl.where(total > 0, total, 1.0)
    tl.store(out + query * DIM + d, mean.to(out.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True)
class Tiling:
    """How a call is cut: rows: queries of a tile; block: KV rows read at a time; splits: of a request's KV rows."""

    rows: int
    block: int
    tiles: int
    splits: int
    num_warps: int
    num_stages: int


def tiling(tokens: int, requests: int, group: int, kv_heads: int, dim: int, max_rows: int, wide: bool) -> Tiling:
    """By shapes alone: requests are taken to be alike. wide: of float32, whose products run on no tensor core."""
    mean = -(-tokens // max(requests, 1))
    least = max(16, triton.next_power_of_2(group))
    rows = least if wide else max(least, min(triton.next_power_of_2(mean * group), MAX_ROWS))
    per_tile = rows // group
    block = 32 if wide else max(32, min(8192 // triton.next_power_of_2(dim), 128))
    busy = kv_heads * max(requests * -(-mean // per_tile), 1)
    most = max(1, min(PROGRAMS // busy, max_rows // (2 * block)))
    return Tiling(
        rows=rows,
        block=block,
        tiles=requests + 1 + tokens // per_tile,
        splits=1 << most.bit_length() - 1,
        num_warps=8 if rows > 64 else 4,
        num_stages=2 if wide else 3 if rows > 32 else 4,
    )


def takes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
) -> bool:
    """Whether heads and groups are of sizes that tiles hold."""
    return q.shape[2] <= MAX_DIM and q.shape[1] // k_cache.shape[1] <= MAX_GROUP


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
) -> Tensor:
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    requests, max_pages = inputs.page_table.shape
    mask = inputs.tree_mask
    out = torch.empty_like(q)
    if tokens == 0:
        return out
    shapes = (tokens, requests, group, kv_heads, dim, max_pages * page_size, q.dtype is torch.float32)
    cut = inputs.plan((tiling, *shapes), lambda: tiling(*shapes))
    width = max(16, triton.next_power_of_2(dim))
    is_split = cut.splits > 1
    parts = q.new_empty((tokens, heads, cut.splits, dim), dtype=torch.float32) if is_split else None
    weights = q.new_empty((tokens, heads, cut.splits), dtype=torch.float32) if is_split else None
    _attend[(kv_heads * cut.splits * cut.tiles,)](
        q, k_cache, v_cache, out, parts, weights, inputs.page_table, inputs.prefix_lens, inputs.q_indptr, mask,
        scale * LOG2_E, window or 0, tokens, requests, max_pages, cut.tiles, cut.splits,
        PAGE=page_size, GROUP=group, KV_HEADS=kv_heads, DIM=dim, WIDTH=width,
        ROWS=cut.rows, BLOCK=cut.block, SPLIT=is_split, TREE=mask is not None, WINDOW=window is not None,
        EARLY=early.is_possible(), num_warps=cut.num_warps, num_stages=cut.num_stages, launch_pdl=early.is_possible(),
    )  # fmt: skip
    if is_split:
        _merge[(tokens * heads,)](
            parts, weights, out, DIM=dim, WIDTH=width, SPLITS=cut.splits, EARLY=early.is_possible(), num_warps=4,
            launch_pdl=early.is_possible(),
        )  # fmt: skip
    return out
