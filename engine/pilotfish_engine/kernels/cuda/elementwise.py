"""Norms, rotation with the cache's write, and gates: each one pass over its rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish_engine.kernels.cuda import early
from pilotfish_engine.kernels.cuda.early import await_others

TILE = 2048  # numbers that a program takes at once: several rows where they are short
HEADS = 16  # that a program rotates
GATED = 1024  # numbers that a program gates


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x, residual, weight, out, num_rows, eps,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    place = row[:, None] * LENGTH + column[None, :]
    is_there = (row < num_rows)[:, None] & (column < LENGTH)[None, :]
    scale = tl.load(weight + column, mask=column < LENGTH, other=0.0).to(tl.float32)
    await_others(EARLY)
    wide = tl.load(x + place, mask=is_there, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + place, mask=is_there, other=0.0).to(tl.float32)
        rounded = wide.to(residual.dtype.element_ty)
        tl.store(residual + place, rounded, mask=is_there)
        wide = rounded.to(tl.float32)
    square = tl.sum(wide * wide, 1) / LENGTH
    normed = wide * tl.rsqrt(square + eps)[:, None] * scale[None, :]
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=is_there)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, length = x.shape
    out = torch.empty_like(x)
    width = triton.next_power_of_2(length)
    rows = max(1, TILE // width)
    if num_rows:
        _rms_norm[(triton.cdiv(num_rows, rows),)](
            x, residual, weight, out, num_rows, eps,
            LENGTH=length, WIDTH=width, ROWS=rows, ADD=residual is not None, EARLY=early.is_possible(),
            num_warps=4 if width <= TILE else 8, launch_pdl=early.is_possible(),
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, eps), residual


@triton.jit
def _rope_and_write(
    qkv, positions, cos_sin, slots, q, k_cache, v_cache,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    await_others(EARLY)
    slot = tl.load(slots + token)
    angle = tl.load(positions + token) * DIM + d
    cos = tl.load(cos_sin + angle, mask=d < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin + angle + HALF, mask=d < HALF, other=0.0)[None, :]
    place = head[:, None] * DIM + d[None, :]
    is_there = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (d < HALF)[None, :]
    source = qkv + token * ((Q_HEADS + 2 * KV_HEADS) * DIM) + place
    first = tl.load(source, mask=is_there, other=0.0)
    second = tl.load(source + HALF, mask=is_there, other=0.0)
    turned_first = (first.to(tl.float32) * cos - second.to(tl.float32) * sin).to(first.dtype)
    turned_second = (second.to(tl.float32) * cos + first.to(tl.float32) * sin).to(first.dtype)

    is_q = is_there & (head < Q_HEADS)[:, None]
    target = q + token * (Q_HEADS * DIM) + place
    tl.store(target, turned_first, mask=is_q)
    tl.store(target + HALF, turned_second, mask=is_q)
    is_v = is_there & (head >= Q_HEADS + KV_HEADS)[:, None]
    is_k = is_there & (head >= Q_HEADS)[:, None] & (head < Q_HEADS + KV_HEADS)[:, None]
    target = k_cache + slot * (KV_HEADS * DIM) + (place - Q_HEADS * DIM)
    tl.store(target, turned_first, mask=is_k)
    tl.store(target + HALF, turned_second, mask=is_k)
    target = v_cache + slot * (KV_HEADS * DIM) + (place - (Q_HEADS + KV_HEADS) * DIM)
    tl.store(target, first, mask=is_v)
    tl.store(target + HALF, second, mask=is_v)


def rope_and_write(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    tokens, length = qkv.shape
    _, kv_heads, dim = k_cache.shape
    heads = length // dim - 2 * kv_heads
    q = qkv.new_empty((tokens, heads, dim))
    if tokens:
        _rope_and_write[(tokens, triton.cdiv(heads + 2 * kv_heads, HEADS))](
            qkv, positions, cos_sin, slots, q, k_cache, v_cache,
            Q_HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=triton.next_power_of_2(dim // 2), HEADS=HEADS,
            EARLY=early.is_possible(), num_warps=4, launch_pdl=early.is_possible(),
        )  # fmt: skip
    return q


@triton.jit
def _gate(
    gate_up, out, LENGTH: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < LENGTH
    await_others(EARLY)
    gate = tl.load(gate_up + row * (2 * LENGTH) + column, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * LENGTH) + LENGTH + column, mask=is_there, other=0.0).to(tl.float32)
    # x · sigmoid(2y) is x / 2 · (1 + tanh(y)), the usual form of the approximation
    weight = gate if SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    gated = gate * tl.sigmoid(weight) * up
    tl.store(out + row * LENGTH + column, gated.to(out.dtype.element_ty), mask=is_there)


def _gated(gate_up: Tensor, silu: bool) -> Tensor:
    rows, length = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, length))
    if rows:
        _gate[(rows, triton.cdiv(length, GATED))](
            gate_up, out, LENGTH=length, BLOCK=GATED, SILU=silu, EARLY=early.is_possible(), num_warps=4,
            launch_pdl=early.is_possible(),
        )  # fmt: skip
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, silu=True)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, silu=False)
