"""One rank's part of the optimizer's steps.

A batch is divided over the ranks by sequence. Each rank's loss counts by its share of the batch's places, so the
gradients that are summed are those of the whole batch; what follows, the norm's bound and AdamW, every rank does alike
with the same numbers. So all hold the same head, and none is sent weights again after the first step. Which sequences a
batch has follows from seed and step, and not from the number of ranks. Knows nothing about time or files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.train.learning import Lesson
from pilotfish_engine.train.memory import remembering
from pilotfish_engine.train.sequences import Answered, collate, plan
from pilotfish_engine.train.settings import TrainSettings

CLIP = 1.0


class Steps:
    """ranks: None where there is only this process. per_epoch: the first epoch's steps, and what others count as."""

    def __init__(
        self,
        settings: TrainSettings,
        lesson: Lesson,
        taught: Sequence[Answered],
        ranks: Ranks | None,
        device: torch.device,
    ) -> None:
        self.head = lesson.head
        self.optimizer = torch.optim.AdamW(lesson.head.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        self._settings = settings
        self._lesson = lesson
        self._taught = taught
        self._ranks = ranks
        self._device = device
        self._lengths = [len(one.token_ids) for one in taught]
        self._epoch = (-1, list[list[int]]())
        self._memory = remembering(lesson.teacher, self._lengths, device)
        self.per_epoch = len(self._batches_of(0))

    def agree(self) -> None:
        """On rank 0's weights, before the first step."""
        if self._ranks is not None:
            for parameter in self.head.parameters():
                parameter.data.copy_(self._ranks.broadcast(parameter.data))

    def take(self, step: int, rate: float) -> Tensor:
        """Step number `step`, from 0, at a learning rate; returns the whole batch's loss, a scalar on the device."""
        epoch, index = divmod(step, self.per_epoch)
        batches = self._batches_of(epoch)
        numbers = batches[index % len(batches)]  # epochs may differ by a batch
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._gradients(numbers)
        nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        self.optimizer.step()
        return loss

    def _gradients(self, numbers: Sequence[int]) -> Tensor:
        places = sum(self._taught[number].roots for number in numbers)
        ranks = self._ranks
        mine = numbers if ranks is None else numbers[ranks.rank :: ranks.size]
        loss = torch.zeros((), device=self._device)
        if mine:
            batch = collate([self._taught[number] for number in mine]).to(self._device)
            read = None if self._memory is None else self._memory.read(mine, batch.tokens)
            share = self._lesson.loss(batch, places, read)
            share.backward()  # type: ignore[no-untyped-call]
            loss = share.detach()
        if ranks is None:
            return loss
        for parameter in self.head.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            ranks.all_reduce(parameter.grad)
        return ranks.all_reduce(loss)

    def _batches_of(self, epoch: int) -> list[list[int]]:
        if self._epoch[0] != epoch:
            self._epoch = (epoch, plan(self._lengths, self._settings.batch_tokens, self._settings.seed, epoch))
        return self._epoch[1]
