"""Reads tensors of known shapes into one arena, in the order of use. Knows nothing about what they are for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pilotfish_engine.model.memory import Arena


class Files(Protocol):
    def read(self, name: str) -> Tensor:
        """The tensor in a floating dtype."""
        ...


class Weights:
    """`shapes`: of every tensor that will be read, by name; they must be those of the files."""

    def __init__(
        self, files: Files, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.files = files
        self.shapes = shapes
        self.device = device
        self.arena = Arena([math.prod(shape) for shape in shapes.values()], dtype, device)

    def read(self, *names: str) -> Tensor:
        """The tensors of these names, stacked along their first axis."""
        rows = sum(self.shapes[name][0] for name in names)
        return self.place([rows, *self.shapes[names[0]][1:]], (self.files.read(name) for name in names))

    def place(self, size: Sequence[int], parts: Iterable[Tensor]) -> Tensor:
        """Tensors that were read from the files and rearranged, stacked along their first axis into one of `size`."""
        stacked, end = self.arena.take(size), 0
        for part in parts:
            stacked[end : (end := end + part.shape[0])].copy_(part)
        assert end == size[0], "the parts fill what is taken for them"
        return stacked

    def read_float32(self, name: str) -> Tensor:
        """For the few tensors whose precision decides more than a rounding; outside of the arena."""
        return self.files.read(name).to(self.device, torch.float32)
