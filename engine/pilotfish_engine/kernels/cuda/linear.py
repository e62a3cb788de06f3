"""Products of few rows with a matrix: the weights pass once, as fast as memory gives them.

A program makes some outputs of all rows, so nothing is summed between programs, and a row's numbers do not depend on
the rows beside it. Launched early, it fetches its first weights into the cache while the kernel before it still runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish_engine.kernels.cuda import early
from pilotfish_engine.kernels.cuda.early import await_others

LEAST_ROWS = 16  # that a product takes
MOST_ROWS = 32  # beyond, the library's kernels are as fast, and for matrices of few outputs beyond the least
LINE = tl.constexpr(64)  # numbers in a line of the cache
DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _fetch(weight, output, is_output, length, LINES: tl.constexpr):
    """The first lines of each output's weights, into the cache."""
    line = weight + output.to(tl.int64)[:, None] * length + LINE * tl.arange(0, LINES)[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [line, is_output.to(tl.int32)[:, None].broadcast_to(line.shape)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _thin(
    x, weight, bias, out, num_rows, outputs, length,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, INPUTS)
    is_output, is_row = output < outputs, row < num_rows
    if EARLY:
        _fetch(weight, output, is_output, length, LINES)
    await_others(EARLY)
    weights = weight + output.to(tl.int64)[:, None] * length + column[None, :]
    values = x + row[None, :] * length + column[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, length, INPUTS, num_stages=STAGES):
        tile = tl.load(weights + start, mask=is_output[:, None], other=0.0, eviction_policy="evict_first")
        given = tl.load(values + start, mask=is_row[None, :], other=0.0)
        total = tl.dot(tile, given, total)
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = row[None, :] * outputs + output[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@dataclass(frozen=True)
class Tile:
    """outputs × inputs of the weights that a program holds at once; stages: how many of these are on their way; lines:
    of the cache, of each output, that are fetched ahead."""

    outputs: int
    inputs: int
    stages: int
    lines: int


SHALLOW = Tile(64, 128, stages=4, lines=4)  # two programs on a multiprocessor,
DEEP = Tile(64, 128, stages=8, lines=4)  # and one, where there are fewer programs than multiprocessors
FEW_OUTPUTS = 64 * 64
LEAST_INPUTS = 1024
SHARED_BYTES = 200 << 10  # of a multiprocessor, that these tiles are meant for


@cache
def is_fit() -> bool:
    """Whether this process's device holds the tiles."""
    device = torch.cuda.get_device_properties()
    return bool(device.shared_memory_per_block_optin >= SHARED_BYTES)


def tile(outputs: int) -> Tile:
    """By the matrix alone, so that any number of rows gives the same bits."""
    return DEEP if outputs <= FEW_OUTPUTS else SHALLOW


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether rows are few and the matrix is of a measured size. The library sums smaller ones between programs, and
    may well be faster."""
    outputs, length = weight.shape
    most = MOST_ROWS if outputs > FEW_OUTPUTS else LEAST_ROWS
    is_measured = outputs >= FEW_OUTPUTS and length >= LEAST_INPUTS and length % SHALLOW.inputs == 0
    return 0 < x.shape[0] <= most and is_measured and x.dtype in DTYPES and is_fit()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    rows, (outputs, length) = x.shape[0], weight.shape
    out = x.new_empty((rows, outputs), dtype=out_dtype)
    cut, is_early = tile(outputs), early.is_possible()
    _thin[(triton.cdiv(outputs, cut.outputs),)](
        x, weight, bias, out, rows, outputs, length,
        ROWS=LEAST_ROWS if rows <= LEAST_ROWS else MOST_ROWS, OUTPUTS=cut.outputs, INPUTS=cut.inputs, STAGES=cut.stages,
        LINES=cut.lines, EARLY=is_early, num_warps=4, launch_pdl=is_early,
    )  # fmt: skip
    return out
