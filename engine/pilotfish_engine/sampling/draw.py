"""The target's token after a position: argmax at temperature 0, else the winner of a race (the Gumbel-max trick).

Every token of the vocabulary gets noise by a hash of the request's seed, the position of the token to come and its own
number, so a request draws the same tokens in whatever batch, chunk or tree its positions are computed. A draft model
that adds the same noise to its own scores draws what the target most likely draws, and is checked against the target's
own draw (Daliri et al., 2025, arXiv 2408.07978): exact whatever it drafts, and the answer does not depend on the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NONE = -1  # no token
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64 (splitmix64, Steele et al. 2014)
_MIX_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_B = -7723592293110705685  # 0x94D049BB133111EB
_SPREAD = -1640531535  # 0x9E3779B1 as int32
_FINAL_A = -2048144789  # 0x85EBCA6B (Murmur3)
_FINAL_B = -1028477387  # 0xC2B2AE35


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of N positions, each [N]: temperature float32 (0: greedy), top_k int64 (vocabulary size: off),
    top_p, min_p float32, seeds int64. Host-known: `filtered`, some row uses a filter."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    filtered: bool


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [N, V]: standard Gumbel noise in [−3.5, 22.2] of each position and token. seeds, positions: int64 [N];
    token_ids: int64 [V]. Splitmix64 of seed and position keys a 32-bit mix of the token (Murmur3's finalizer)."""
    x = seeds + (positions + 1) * _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_B
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    first, second = x.to(torch.int32).unsqueeze(1), (x >> 32).to(torch.int32).unsqueeze(1)
    mixed = (token_ids.to(torch.int32) * _SPREAD) ^ first
    mixed ^= (mixed >> 16) & 0xFFFF
    mixed *= _FINAL_A
    mixed ^= second
    mixed ^= (mixed >> 13) & 0x7FFFF
    mixed *= _FINAL_B
    mixed ^= (mixed >> 16) & 0xFFFF
    # 31 bits, small ones kept exactly: the winner has a small exponential
    chance = (((mixed >> 1) & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    exponential = torch.log1p(-chance).neg_().clamp_(max=30.0)
    return exponential.log_().neg_()


def filter_sorted(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Zeroes what top-k, then top-p over what is left, then min-p rule out. probs: float64 [N, V], descending."""
    rank = torch.arange(probs.shape[1], device=probs.device)
    probs = torch.where(rank < rows.top_k.unsqueeze(1), probs, 0.0)
    before = probs.cumsum(dim=1) - probs
    total = probs.sum(dim=1, keepdim=True)
    # the first token always stays: top_p is above 0 and `before` is 0 for it
    probs = torch.where(before < rows.top_p.unsqueeze(1) * total, probs, 0.0)
    return torch.where(probs >= rows.min_p.unsqueeze(1) * probs[:, :1], probs, 0.0)


def choose(logits: torch.Tensor, positions: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
    """int64 [N]: the token that follows each row, NONE where its logits have no largest finite number: a NaN, +∞, or
    nothing but −∞. logits: float32 [N, V]; positions: int64 [N], of the token to come; rows: None where all are greedy.
    """
    if rows is None:
        return _best(logits)
    hot, scaled = _scaled(logits, rows)
    if rows.filtered:
        ordered, order = torch.softmax(scaled.to(torch.float64), dim=1).sort(dim=1, descending=True, stable=True)
        kept = torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, order, filter_sorted(ordered, rows) > 0)
        scaled = torch.where(kept | ~hot, scaled, -torch.inf)
    return _best(torch.where(hot, scaled + _noise(scaled, positions, rows), scaled))


def _best(scores: torch.Tensor) -> torch.Tensor:
    best = scores.argmax(dim=1)  # which is a NaN's where there is one
    is_finite = scores.gather(1, best.unsqueeze(1)).squeeze(1).isfinite()
    return torch.where(is_finite, best, NONE)


def draft_logits(
    logits: torch.Tensor, positions: torch.Tensor, rows: SamplingRows | None, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [N, V], by whose softmax a draft picks its tokens: its logits [N, V], at a temperature with the noise
    that the target's draw has. token_ids: int64 [V], the target's numbers of a draft's own vocabulary. rows: as
    `choose` takes it."""
    if rows is None:
        return logits
    hot, scaled = _scaled(logits, rows)
    return torch.where(hot, scaled + _noise(scaled, positions, rows, token_ids), scaled)


def _scaled(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows are sampled, [N, 1], and the logits over their temperature."""
    hot = (rows.temperature > 0).unsqueeze(1)
    return hot, logits / torch.where(hot, rows.temperature.unsqueeze(1), 1.0)


def _noise(
    logits: torch.Tensor, positions: torch.Tensor, rows: SamplingRows, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    if token_ids is None:
        token_ids = torch.arange(logits.shape[1], device=logits.device)
    return gumbel(rows.seeds, positions, token_ids)
