"""The best tokens of each row of logits and their log-probabilities, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers of a row that a program holds at once
MAX_K = 16  # the row is read once more for each
LOWEST = tl.constexpr(-1e30)  # below every logit, and finite: differences of it are no NaN


@triton.jit(do_not_specialize=["length"])
def _top(x, scores, places, length, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        value = tl.load(x + row * length + start + lane, mask=start + lane < length, other=float("-inf"))
        higher = tl.maximum(top, value)
        total = total * tl.exp(top - higher) + tl.exp(value - higher)
        top = higher
    highest = tl.max(top, 0)
    log_total = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    last = tl.full([], float("inf"), tl.float32)
    last_place = tl.full([], -1, tl.int32)
    for number in tl.static_range(K):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_place = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in range(0, length, BLOCK):
            place = start + lane
            value = tl.load(x + row * length + place, mask=place < length, other=float("-inf"))
            # behind the last one taken: lower, or as high and further back
            is_left = (value < last) | ((value == last) & (place > last_place))
            is_better = is_left & (value > best)
            best = tl.where(is_better, value, best)
            best_place = tl.where(is_better, place, best_place)
        last = tl.max(best, 0)
        # of a row of padding, which may hold anything, some place that there is
        last_place = tl.minimum(tl.min(tl.where(best == last, best_place, 0x7FFFFFFF), 0), length - 1)
        tl.store(scores + row * K + number, last - log_total)
        tl.store(places + row * K + number, last_place.to(tl.int64))


def takes(x: Tensor, k: int) -> bool:
    return x.dtype is torch.float32 and k <= MAX_K


def top_log_probs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, length = x.shape
    scores = x.new_empty((rows, k))
    places = torch.empty((rows, k), dtype=torch.int64, device=x.device)
    if rows:
        _top[(rows,)](x, scores, places, length, K=k, BLOCK=min(triton.next_power_of_2(length), BLOCK), num_warps=8)
    return scores, places
