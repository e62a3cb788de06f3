"""Says what a head learns from a batch, and how long its chains would be.

The loss of a place is −Σ p(x) log q(x) over the tokens x that the draft can say: p is the target's probability among
all its tokens, q the draft's. A token outside of the draft's vocabulary can never be accepted, so it pulls at nothing,
and a place counts by the share of the target's mass that can be drafted there at all: acceptance, Σ min(p, q), cannot
be more. Steps weigh DECAY^s, as a later draft matters only where those before it were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish_engine import kernels
from pilotfish_engine.train.head import TrainedHead
from pilotfish_engine.train.sequences import Answered, SequenceBatch, collate, plan
from pilotfish_engine.train.teacher import Teacher

DECAY = 0.8
CHAIN = 4  # drafts of the chains that are counted


@dataclass(frozen=True)
class HeldOut:
    """agreed: by depth, the share of places where the draft says the target's token, the path before it being right.
    acceptance_length: tokens a step of chains of CHAIN drafts, at temperature 0, the target's own included."""

    agreed: tuple[float, ...]
    acceptance_length: float


class _Match(torch.autograd.Function):
    """The gradients are made with the loss, so that no logits are kept until the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, says: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        logits = rows @ says.T
        losses = kernels.match_rows(logits, wanted, weights)
        ctx.save_for_backward(logits @ says, logits.T @ rows)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_rows, of_says = ctx.saved_tensors
        return of_rows * slope, of_says * slope, None, None


def matched(rows: Tensor, says: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """Of rows [M, H], and output weights [V, H], the cross-entropy with `wanted` [M, V], weighted and added up."""
    return _Match.apply(rows, says, wanted, weights)  # type: ignore[no-any-return]


class Lesson:
    """head beside its target. embedding: the target's. steps: of training-time test."""

    def __init__(self, head: TrainedHead, teacher: Teacher, embedding: Tensor, steps: int) -> None:
        self.head = head
        self.teacher = teacher
        self.embedding = embedding
        self.steps = steps
        coarse = embedding.dtype == torch.bfloat16
        self._precision: Callable[[], AbstractContextManager[object]] = (
            (lambda: torch.autocast(embedding.device.type, torch.bfloat16)) if coarse else nullcontext
        )

    def loss(self, batch: SequenceBatch, places: int, read: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """A scalar to differentiate, per place. places: of the whole batch, of which `batch` may be a part; the losses
        of its parts add up to its own. read: what the teacher reads of the batch, where that is known."""
        hidden, features = read or self.teacher.read(batch.tokens)
        # row i + s is of the token that root i drafts at step s
        wanted = functional.pad(self.teacher.probabilities(hidden[batch.roots + 1]), (0, 0, 0, self.steps))
        weights = [DECAY**step for step in range(self.steps)]
        each = 1 / (places * sum(weights))
        total = hidden.new_zeros((), dtype=torch.float32)
        says = self.head.lm_head.weight.to(wanted.dtype)
        with self._precision():
            for step, (out, weight) in enumerate(zip(self._unrolled(batch, features), weights, strict=True)):
                rows = out.flatten(0, 1)[batch.roots].to(wanted.dtype)
                counts = (batch.left > step).float() * (weight * each)
                total = total + matched(rows, says, wanted[step : step + len(rows)], counts)
        return total

    def _unrolled(self, batch: SequenceBatch, features: Tensor) -> Sequence[Tensor]:
        return list(self.head.unroll(features, batch.tokens, self.embedding, self.steps))

    @torch.no_grad()
    def agreement(self, batch: SequenceBatch) -> Tensor:
        """bool [M, steps]: whether the draft of each step says what the answer says; False past its end."""
        _, features = self.teacher.read(batch.tokens)
        flat, agreed = batch.tokens.flatten(), []
        with self._precision():
            for step, out in enumerate(self._unrolled(batch, features)):
                inside = batch.left > step
                said = self.teacher.token_ids[self.head.lm_head(out.flatten(0, 1)[batch.roots]).argmax(dim=1)]
                at = (batch.roots + 2 + step).clamp(max=len(flat) - 1)
                agreed.append(inside & (said == flat[at]))
        return torch.stack(agreed, dim=1)


def held_out(lesson: Lesson, sequences: Sequence[Answered], batch_tokens: int, device: torch.device) -> HeldOut:
    """Chains drafted along greedy answers, for acceptance_length. They begin where steps of serving would."""
    steps = lesson.steps
    right, asked = torch.zeros(steps), torch.zeros(steps)
    tokens = taken = 0
    for numbers in plan([len(one.token_ids) for one in sequences], batch_tokens, seed=0, epoch=0):
        chosen = [sequences[number] for number in numbers]
        agreed = lesson.agreement(collate(chosen).to(device)).cpu()
        path = agreed.long().cumprod(dim=1)
        first = 0
        for one in chosen:
            rows = path[first : first + one.roots]
            right += rows.sum(dim=0)
            for step in range(steps):
                asked[step] += rows[: max(0, one.roots - step), step - 1].sum() if step else one.roots
            lengths = rows[:, :CHAIN].sum(dim=1).tolist()
            at = 0
            while at < one.roots:
                taken += 1
                at += lengths[at] + 1
            tokens += min(at, one.roots)
            first += one.roots
    return HeldOut(tuple((right / asked.clamp(min=1)).tolist()), tokens / max(1, taken))
