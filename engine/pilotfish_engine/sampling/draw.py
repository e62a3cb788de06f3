"""The target's token after a position: argmax at temperature 0, else one inverse-CDF draw with a counter-based uniform.

The uniform is a hash of the request's seed and the position of the token to come, so a request draws the same tokens in
whatever batch, chunk or tree its positions are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64 (splitmix64, Steele et al. 2014)
_MIX_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_B = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of N positions, each [N]: temperature float32 (0: greedy), top_k int64 (vocabulary size: off),
    top_p, min_p float32, seeds int64. Host-known: `greedy` all rows are greedy; `filtered` some row uses a filter."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    greedy: bool
    filtered: bool


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [N] in [0, 1 − 2⁻³²]: splitmix64 of seed and position. seeds, positions: int64 [N]."""
    x = seeds + (positions + 1) * _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_B
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 32) & ((1 << 32) - 1)).to(torch.float64) * 2.0**-32


def filter_sorted(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Zeroes what top-k, then top-p over what is left, then min-p rule out. probs: float64 [N, V], descending."""
    rank = torch.arange(probs.shape[1], device=probs.device)
    probs = torch.where(rank < rows.top_k.unsqueeze(1), probs, 0.0)
    before = probs.cumsum(dim=1) - probs
    total = probs.sum(dim=1, keepdim=True)
    # the first token always stays: top_p is above 0 and `before` is 0 for it
    probs = torch.where(before < rows.top_p.unsqueeze(1) * total, probs, 0.0)
    return torch.where(probs >= rows.min_p.unsqueeze(1) * probs[:, :1], probs, 0.0)


def choose(logits: torch.Tensor, positions: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """int64 [N]: the token that follows each row. logits: float32 [N, V]; positions: int64 [N], of the token to
    come."""
    best = logits.argmax(dim=1)
    if rows.greedy:
        return best
    hot = rows.temperature > 0
    scale = torch.where(hot, rows.temperature, 1.0).unsqueeze(1)
    probs = torch.softmax(logits.to(torch.float64) / scale, dim=1)
    point = uniform(rows.seeds, positions).unsqueeze(1)
    if rows.filtered:
        # back in vocabulary order, so that a row draws the same token whether or not another row's filter sorts it
        ordered, order = probs.sort(dim=1, descending=True, stable=True)
        probs = torch.zeros_like(probs).scatter_(1, order, filter_sorted(ordered, rows))
    drawn = _invert(probs, point).squeeze(1)
    return torch.where(hot, drawn, best)


def _invert(weights: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """int64 [N, 1]: first index whose cumulative weight exceeds point · total; a zero weight is never picked."""
    cdf = weights.cumsum(dim=1)
    return torch.searchsorted(cdf, point * cdf[:, -1:], right=True)
