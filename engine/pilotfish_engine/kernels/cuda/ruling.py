"""Rules out the tokens that a grammar does not allow, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers of a row that a program does: a multiple of a word's 32


@triton.jit(do_not_specialize=["length", "words"])
def _rule_out(logits, allowed, out, length, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    word = tl.load(allowed + row * words + place // 32, mask=inside, other=0)
    value = tl.load(logits + row * length + place, mask=inside, other=0.0)
    ruled = tl.where((word >> (place % 32)) & 1 != 0, 0.0, float("-inf"))
    tl.store(out + row * length + place, value + ruled, mask=inside)


def rule_out(logits: Tensor, allowed: Tensor) -> Tensor:
    rows, length = logits.shape
    out = torch.empty_like(logits)
    if rows:
        grid = (rows, triton.cdiv(length, BLOCK))
        _rule_out[grid](logits, allowed, out, length, allowed.shape[1], BLOCK=BLOCK, num_warps=8)
    return out
