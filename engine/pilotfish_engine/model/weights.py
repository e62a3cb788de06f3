"""Reads tensors of known shapes into one arena, in the order of use. Knows nothing about what they are for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pilotfish_engine.model.linear import is_dense
from pilotfish_engine.model.memory import Arena, zeros

Cut = tuple[slice, ...]  # of each axis of a tensor, the part that a rank has


class Files(Protocol):
    def read(self, name: str) -> Tensor:
        """The tensor in a floating dtype, cut for this rank."""
        ...

    def stored_type(self, name: str) -> str:
        """The type in which the files hold it. It has the format's own name, like BF16, F8_E4M3, Q4_K."""
        ...

    def read_stored(self, name: str) -> Mapping[str, Tensor]:
        """What the files hold of it: "weight", and "scale" where there is one; whole, whatever the rank."""
        ...

    def cut(self, name: str) -> Cut | None:
        """Which part of the whole is this rank's; None: all of it."""
        ...


class Weights:
    """`shapes`: of every tensor that will be read, by name; they must be those of the files, as this rank has them."""

    def __init__(
        self, files: Files, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.files = files
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        sizes = [math.prod(shape) for name, shape in shapes.items() if is_dense(files, name)]
        self.arena = Arena(sizes, dtype, device)

    def read(self, name: str) -> Tensor:
        return self.place(self.shapes[name], [self.files.read(name)])

    def place(self, size: Sequence[int], parts: Iterable[Tensor]) -> Tensor:
        """Stacks tensors that were read and rearranged along their first axis, into one of `size`."""
        # no room was reserved for what is stored in another form, and is made dense all the same
        stacked = self.arena.take(size) if self.arena.has(size) else zeros(size, self.dtype, self.device)
        end = 0
        for part in parts:
            stacked[end : (end := end + part.shape[0])].copy_(part)
        assert end == size[0], "the parts fill what is taken for them"
        return stacked

    def read_float32(self, name: str) -> Tensor:
        """For the few tensors whose precision decides more than a rounding; outside of the arena."""
        return self.files.read(name).to(self.device, torch.float32)
