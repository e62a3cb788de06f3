"""Cross-entropy with a distribution, and its gradient, over rows of logits, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers of a row that a program holds at once
LOWEST = tl.constexpr(-1e30)  # below every logit, and finite: differences of it are no NaN


@triton.jit(do_not_specialize=["length"])
def _match(logits, wanted, weights, losses, length, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    agreed = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        inside = start + lane < length
        value = tl.load(logits + row * length + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        share = tl.load(wanted + row * length + start + lane, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(top, value)
        total = total * tl.exp(top - higher) + tl.exp(value - higher)
        top = higher
        mass += share
        agreed += tl.where(inside, share * value, 0.0)
    highest = tl.max(top, 0)
    log_total = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    whole = tl.sum(mass, 0)
    weight = tl.load(weights + row)
    tl.store(losses + row, weight * (whole * log_total - tl.sum(agreed, 0)))
    for start in range(0, length, BLOCK):
        inside = start + lane < length
        value = tl.load(logits + row * length + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        share = tl.load(wanted + row * length + start + lane, mask=inside, other=0.0).to(tl.float32)
        slope = weight * (whole * tl.exp(value - log_total) - share)
        tl.store(logits + row * length + start + lane, slope.to(logits.dtype.element_ty), mask=inside)


def match_rows(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    rows, length = logits.shape
    losses = torch.empty_like(weights)
    if rows:
        _match[(rows,)](logits, wanted, weights, losses, length, BLOCK=BLOCK, num_warps=8)
    return losses
