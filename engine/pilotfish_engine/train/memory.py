"""Keeps what the target said of sequences, so that it reads each once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pilotfish_engine.train.teacher import Teacher

SHARE = 0.6  # of the device's free memory, at most


class Memory:
    """lengths: tokens of each sequence. It fills as sequences are read for the first time."""

    def __init__(self, teacher: Teacher, lengths: Sequence[int], device: torch.device) -> None:
        self._teacher = teacher
        self._lengths = torch.tensor(lengths)
        self._first = torch.tensor([0, *accumulate(lengths)])
        self._known = [False] * len(lengths)
        self._rows = torch.zeros(int(self._first[-1]), teacher.width, dtype=teacher.dtype, device=device)

    def read(self, numbers: Sequence[int], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: int64 [B, T], of the sequences so numbered → as `Teacher.read`, but in padding anything."""
        at, inside = self._places(numbers, tokens.shape[1])
        if all(self._known[number] for number in numbers):
            rows = self._rows[at.to(tokens.device, non_blocking=True)]
            return rows[:, : self._teacher.shape.hidden_size], rows[:, self._teacher.shape.hidden_size :].view(
                *tokens.shape, -1
            )
        hidden, features = self._teacher.read(tokens)
        both = torch.cat((hidden, features.flatten(0, 1)), dim=1)
        self._rows[at[inside].to(tokens.device)] = both[inside.nonzero().squeeze(1).to(tokens.device)]
        for number in numbers:
            self._known[number] = True
        return hidden, features

    def _places(self, numbers: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Of the batch's places, flat: rows here, and which are no padding; on the CPU."""
        chosen, column = torch.tensor(numbers), torch.arange(length)
        inside = column < self._lengths[chosen].unsqueeze(1)
        at = self._first[chosen].unsqueeze(1) + column
        return torch.where(inside, at, 0).flatten(), inside.flatten()


def remembering(teacher: Teacher, lengths: Sequence[int], device: torch.device) -> Memory | None:
    """Returns None where nothing is kept. That is on a CPU, where a run that goes on must take the very steps it
    would have taken, and where the device has too little room."""
    if device.type != "cuda":
        return None
    needed = sum(lengths) * teacher.width * teacher.dtype.itemsize
    return Memory(teacher, lengths, device) if needed < SHARE * torch.cuda.mem_get_info(device)[0] else None
