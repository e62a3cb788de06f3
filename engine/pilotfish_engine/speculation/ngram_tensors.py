"""The matcher as tensor code of fixed shapes, for a state on a GPU: no host copies, so that a CUDA graph can hold it.

The rules are those of csrc/ngram.cpp, and so are the candidates, number for number. B requests, M matches a request,
K = num_steps. Matches are sorted best first; one that is not there has length 0 and continues with NONE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from pilotfish_engine.speculation.ngram_matcher import (
    MAX_NGRAM,
    MIN_NGRAM,
    NONE,
    Corpus,
    matches_wanted,
    width,
)
from pilotfish_engine.speculation.tree import ABSENT, Candidates

AT_ONCE = 1 << 22  # tokens of the batch that are compared at once: some 100 MiB of temporaries, whatever the context
UNIT = 720720  # 1 … 16 divide it: weights are whole numbers, and their sums exact
WINDOW = 16  # corpus entries looked at around a context's place


@dataclass(frozen=True)
class _Matches:
    """lengths (of the common context), weights: int64 [B, M]. tokens: int64 [B, M, K], NONE from where nothing
    follows."""

    lengths: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor


def drafts(
    tokens: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor, topk: int, num_steps: int, corpus: Corpus | None
) -> Candidates:
    """As ngram_matcher.drafts, on any device."""
    last = seq_lens[rows]
    at = last.unsqueeze(1) - torch.arange(MAX_NGRAM, device=rows.device)
    suffix = torch.where(at >= 0, tokens[rows.unsqueeze(1), at.clamp_min(0)], NONE - 1)  # the last token first
    wanted = matches_wanted(topk)
    matches = _own_matches(tokens, rows, last, suffix, wanted, num_steps)
    if corpus is not None:
        other = _corpus_matches(corpus, suffix, wanted, num_steps)
        farther = (other.lengths[:, 0] > matches.lengths[:, 0]).unsqueeze(1)
        matches = _Matches(
            lengths=torch.where(farther, other.lengths, matches.lengths),
            weights=torch.where(farther, other.weights, matches.weights),
            tokens=torch.where(farther.unsqueeze(2), other.tokens, matches.tokens),
        )
    return _merge(matches, topk, num_steps)


def _own_matches(
    tokens: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, suffix: torch.Tensor, wanted: int, num_steps: int
) -> _Matches:
    """The best matches in the request's own tokens: the longest first, the most recent among equals. A continuation
    that reaches their end goes on through itself."""
    batch, span, device = rows.shape[0], tokens.shape[1], rows.device
    best = torch.zeros(batch, wanted, dtype=torch.int64, device=device)  # length * span + where the match ends
    step = max(1, AT_ONCE // batch)
    for begin in range(0, span, step):
        end = min(span, begin + step)
        before = min(begin, MAX_NGRAM - 1)
        seen = functional.pad(tokens[:, begin - before : end][rows], (MAX_NGRAM - 1 - before, 0), value=NONE)
        position = torch.arange(begin, end, device=device)
        run = position < last.unsqueeze(1)
        lengths = torch.zeros(batch, end - begin, dtype=torch.int8, device=device)
        for j in range(MAX_NGRAM):
            first = MAX_NGRAM - 1 - j
            run = run & (seen[:, first : first + end - begin] == suffix[:, j : j + 1])
            lengths += run
        key = torch.where(lengths >= MIN_NGRAM, lengths.to(torch.int64) * span + position, 0)
        best = torch.cat([best, key.topk(min(wanted, end - begin), dim=1).values], dim=1).topk(wanted, dim=1).values
    lengths = best // span
    start = best % span + 1
    period = (last + 1).unsqueeze(1) - start
    ahead = torch.arange(num_steps, device=device)
    at = start.unsqueeze(2) + ahead % period.clamp_min(1).unsqueeze(2)
    following = torch.where(lengths.unsqueeze(2) > 0, tokens[rows.view(-1, 1, 1), at.clamp_max(span - 1)], NONE)
    rank = torch.arange(1, wanted + 1, device=device)
    return _Matches(lengths, _weights(lengths) // rank, following)


def _corpus_matches(corpus: Corpus, suffix: torch.Tensor, wanted: int, num_steps: int) -> _Matches:
    """The best matches among the corpus entries around the place of the request's context in the order: none of the
    others shares more of it."""
    entries, device = corpus.order.shape[0], suffix.device
    back = torch.arange(1, MAX_NGRAM + 1, device=device)
    powers = 3 ** (MAX_NGRAM - back)  # a sum of signs times these has the sign of the first that is not 0
    low = torch.zeros_like(suffix[:, 0])
    high = low + entries
    for _ in range(entries.bit_length()):
        middle = (low + high) // 2
        at = corpus.order[middle.clamp_max(entries - 1)].unsqueeze(1)
        signs = (corpus.tokens[at - back] - suffix).sign()
        smaller = (low < high) & ((signs * powers).sum(dim=1) < 0)
        low, high = torch.where(smaller, middle + 1, low), torch.where(smaller, high, middle)
    entry = low.unsqueeze(1) + torch.arange(-(WINDOW // 2), WINDOW // 2, device=device)
    at = corpus.order[entry.clamp(0, entries - 1)].to(torch.int64)
    shared = (corpus.tokens[at.unsqueeze(2) - back] == suffix.unsqueeze(1)).to(torch.int64).cumprod(dim=2).sum(dim=2)
    lengths = torch.where((entry >= 0) & (entry < entries) & (shared >= MIN_NGRAM), shared, 0)
    # the longest first, in the order of the entries among equals
    best = (lengths * WINDOW + torch.arange(WINDOW - 1, -1, -1, device=device)).topk(wanted, dim=1).values
    lengths = best // WINDOW
    at = at.gather(1, WINDOW - 1 - best % WINDOW)
    following = corpus.tokens[at.unsqueeze(2) + torch.arange(num_steps, device=device)].to(torch.int64)
    goes_on = (following != NONE).to(torch.int64).cumprod(dim=2) * (lengths > 0).unsqueeze(2)
    return _Matches(lengths, _weights(lengths), torch.where(goes_on > 0, following, NONE))


def _weights(lengths: torch.Tensor) -> torch.Tensor:
    """Each token more of context doubles what a match counts."""
    return torch.where(lengths > 0, torch.full_like(lengths, UNIT) << lengths, 0)


def _merge(matches: _Matches, topk: int, num_steps: int) -> Candidates:
    """Merges the continuations: what followed more often branches first. A node is named by the first match that
    reaches it: column 0 … topk − 1 for the first tokens, best first, then M columns a depth, that of match m being m.
    """
    tokens = matches.tokens
    batch, wanted, _ = tokens.shape
    device = tokens.device
    number = torch.arange(wanted, device=device)
    mine, other = number.view(1, -1, 1, 1), number.view(1, 1, -1, 1)
    alike = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & (tokens != NONE).unsqueeze(1)
    same = alike.to(torch.int64).cumprod(dim=3) > 0  # [B, M, M, K]: both go the same way down to this depth
    siblings = torch.cat([torch.ones_like(same[..., :1]), same[..., :-1]], dim=3)
    first = torch.where(same, other, wanted).amin(dim=2)  # [B, M, K]
    node = first == number.unsqueeze(1)
    first = first.clamp_max(wanted - 1)
    votes = torch.where(same, matches.weights.view(batch, 1, wanted, 1), 0).sum(dim=2)
    ahead = votes.unsqueeze(1) - votes.unsqueeze(2)
    before = (ahead > 0) | ((ahead == 0) & (other < mine))
    rank = (before & siblings & node.unsqueeze(1)).sum(dim=2)
    within = (rank < topk).to(torch.int64).gather(1, first).cumprod(dim=2) > 0
    kept = node & within

    depth = torch.arange(num_steps, device=device)
    column = topk + (depth - 1) * wanted + number.unsqueeze(1)
    column = torch.where(depth == 0, rank, column)
    parents = torch.cat([torch.full_like(column[..., :1], -1), column[..., :-1].gather(1, first[..., :-1])], dim=2)
    total = matches.weights.sum(dim=1).clamp_min(1)
    # the share of the votes, and at each step the risk that the context misleads: longer ones are surer. In float64,
    # so that rounding to float32 leaves nothing of how a device computes logarithms
    risk = 2.0 * (depth + 1).to(torch.float64) / (1 + matches.lengths).unsqueeze(2)
    scores = (votes.to(torch.float64) / total.view(-1, 1, 1)).log() - risk
    count = width(topk, num_steps)
    column = torch.where(kept, column, count).flatten(1)  # a spare column takes what is not kept

    def place(values: torch.Tensor, empty: float) -> torch.Tensor:
        placed = torch.full((batch, count + 1), empty, dtype=values.dtype, device=device)
        return placed.scatter_(1, column, values.flatten(1))[:, :count]

    return Candidates(place(tokens, 0), place(parents, -1), place(scores.to(torch.float32), ABSENT))
