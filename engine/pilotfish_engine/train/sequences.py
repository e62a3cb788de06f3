"""Pads token sequences to batches, in an order that seed and epoch decide.

A sequence is a prompt and its answer. Places that are trained on are those where serving drafts: the target has just
said a token of the answer, and the next ones are to come. Knows nothing about models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 64  # batches whose sequences are sorted by length together, so that little is padding


@dataclass(frozen=True)
class Answered:
    """token_ids: prompt, and answer from prompt_len on. greedy: the target's own words at temperature 0."""

    token_ids: Sequence[int]
    prompt_len: int
    greedy: bool = False

    @property
    def roots(self) -> int:
        """Positions from which a token of the answer is drafted behind one that is known."""
        return max(0, len(self.token_ids) - self.prompt_len - 1)


@dataclass(frozen=True)
class SequenceBatch:
    """tokens: int64 [B, T], padded with 0. Of M roots, sequence after sequence: roots int64 [M], flat places in [B·T];
    left int64 [M], how many tokens of the answer come behind the first unknown one, it included."""

    tokens: Tensor
    roots: Tensor
    left: Tensor

    def to(self, device: torch.device) -> SequenceBatch:
        return SequenceBatch(*(x.to(device, non_blocking=True) for x in (self.tokens, self.roots, self.left)))


def cut_to(sequences: Sequence[Answered], max_length: int) -> list[Answered]:
    """Their first max_length tokens; those that leave nothing to draft are left out."""
    short = (Answered(one.token_ids[:max_length], one.prompt_len, one.greedy) for one in sequences)
    return [one for one in short if one.roots > 0]


def plan(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Which sequences are in each batch of an epoch: every one once, batch_tokens with padding at most in each."""
    dice = random.Random(f"{seed} {epoch}")
    order = list(range(len(lengths)))
    dice.shuffle(order)
    batches: list[list[int]] = []
    for window in _windows(order, lengths, WINDOW * batch_tokens):
        window.sort(key=lambda number: lengths[number])
        batches += _filled(window, lengths, batch_tokens)
    dice.shuffle(batches)
    return batches


def _windows(order: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    windows: list[list[int]] = [[]]
    taken = 0
    for number in order:
        if taken >= tokens:
            windows.append([])
            taken = 0
        windows[-1].append(number)
        taken += lengths[number]
    return windows


def _filled(ascending: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for number in ascending:
        if not batches or (len(batches[-1]) + 1) * lengths[number] > batch_tokens:
            batches.append([])
        batches[-1].append(number)
    return batches


def collate(sequences: Sequence[Answered]) -> SequenceBatch:
    length = max(len(one.token_ids) for one in sequences)
    tokens = torch.zeros(len(sequences), length, dtype=torch.int64)
    roots, left = [], []
    for row, one in enumerate(sequences):
        tokens[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
        first = row * length + one.prompt_len - 1
        roots.append(torch.arange(first, first + one.roots))
        left.append(torch.arange(one.roots, 0, -1))
    return SequenceBatch(tokens, torch.cat(roots), torch.cat(left))
