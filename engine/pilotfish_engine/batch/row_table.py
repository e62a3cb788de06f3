"""Holds what is kept of each request by row: tensors on the device and numbers on the host, each under a name.

So whoever keeps something of a request need not know how a row is written out, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pilotfish_engine.errors import HandoverError


class RowTable:
    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._numbers: dict[str, list[int]] = {}

    def new(self, name: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns zeros [R, *size] for the one who asks to read and write; `name` is nobody else's."""
        assert name not in self._tensors, f"two things are called {name}"
        self._tensors[name] = torch.zeros(self._rows, *size, dtype=dtype, device=self._device)
        return self._tensors[name]

    def new_numbers(self, name: str) -> list[int]:
        """Returns a number of each row, 0 at first, which the host keeps."""
        assert name not in self._numbers, f"two things are called {name}"
        self._numbers[name] = [0] * self._rows
        return self._numbers[name]

    def of(self, row: int) -> dict[str, Tensor]:
        """Returns a copy of all that is kept of a row, on the host."""
        kept = {name: tensor[row].cpu().clone() for name, tensor in self._tensors.items()}
        return kept | {name: torch.tensor(numbers[row]) for name, numbers in self._numbers.items()}

    def check(self, kept: dict[str, Tensor]) -> None:
        """Raises HandoverError unless this is what `of` returns here, by names, sizes and types."""
        own = self.of(0)
        for name in sorted(own.keys() | kept.keys()):
            here, there = _described(own.get(name)), _described(kept.get(name))
            if here != there:
                raise HandoverError(
                    f"{name} of the request is {there}, and this engine keeps {here}; an engine of the same models and "
                    "method would work"
                )

    def put(self, row: int, kept: dict[str, Tensor]) -> None:
        """What `of` returned becomes this row's."""
        for name, tensor in self._tensors.items():
            tensor[row] = kept[name].to(self._device)
        for name, numbers in self._numbers.items():
            numbers[row] = int(kept[name])


def _described(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
