"""Holds the matrices of a model: how they stand in a checkpoint, are read, cut for a rank, kept and multiplied.

A layer is told the names of its rows and nothing of how they are stored. What a checkpoint stores in a form that some
`Kind` keeps as it is, is that kind's; all else is dense. A further form is one file with a Kind, and one `register`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish_engine import kernels

if TYPE_CHECKING:
    from pilotfish_engine.model.weights import Files, Weights

GROUPED_ALIGNMENT = 16  # bytes, of which the library's grouped product takes rows of multiples


@dataclass(frozen=True)
class Rows:
    """Rows of one matrix of a checkpoint. name: without ".weight" and ".bias"; order: int64, which rows of what this
    rank has of it, and in which order (None: all, as they stand)."""

    name: str
    order: Tensor | None = None

    def of(self, matrix: Tensor) -> Tensor:
        return matrix if self.order is None else matrix[self.order]


class Linear(Protocol):
    """x [N, in] → x · weightᵀ + bias, [N, out]."""

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """out_dtype: float32, or that of x."""
        ...

    def behind(self, first: int) -> Linear:
        """The layer of all rows from this one on; nothing is copied."""
        ...

    def dense(self) -> Tensor:
        """[out, in]: the weights as numbers in a floating dtype."""
        ...


class Experts(Protocol):
    """count: of the matrices, all of one size."""

    count: int

    def __call__(self, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """x [M, in], row m times the matrix of experts[m], transposed → [M, out]. experts int64 [M] ascend; ends int32
        [count] is where each one's rows end."""
        ...


class Kind(Protocol):
    """A form in which matrices are stored and kept. `files` cut for a rank says by `cut` which part is its own."""

    def holds(self, files: Files, name: str) -> bool:
        """Whether this matrix stands so in the files; name: with ".weight"."""
        ...

    def linear(self, weights: Weights, parts: Sequence[Rows], bias: bool) -> Linear:
        """The rows of all parts, one below the other."""
        ...

    def experts(self, weights: Weights, matrices: Sequence[Sequence[Rows]]) -> Experts: ...


class Dense:
    """weight [out, in], bias [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return kernels.linear(x, self.weight, self.bias, out_dtype)

    def behind(self, first: int) -> Dense:
        return Dense(self.weight[first:], None if self.bias is None else self.bias[first:])

    def dense(self) -> Tensor:
        return self.weight


class DenseExperts:
    """weight: [E, out, in].

    Grouped products read every weight of a chosen expert once, whatever M is, and waste none. Where the library has
    none that stays on the device, on a GPU in other dtypes than bfloat16 and for rows of odd lengths, each pair
    multiplies a copy of its expert's matrix instead: right, and as slow as it sounds.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.count = weight.shape[0]
        self._aligned = all(width * weight.itemsize % GROUPED_ALIGNMENT == 0 for width in weight.shape[1:])

    def __call__(self, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        if not self._aligned or (x.is_cuda and x.dtype is not torch.bfloat16):
            return torch.bmm(self.weight[experts], x.unsqueeze(2)).squeeze(2)
        return functional.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)


class DenseKind:
    """What every checkpoint can be read as."""

    def holds(self, files: Files, name: str) -> bool:
        return True

    def linear(self, weights: Weights, parts: Sequence[Rows], bias: bool) -> Dense:
        return Dense(self._stacked(weights, parts, "weight"), self._stacked(weights, parts, "bias") if bias else None)

    def experts(self, weights: Weights, matrices: Sequence[Sequence[Rows]]) -> DenseExperts:
        stacked = self._stacked(weights, [part for matrix in matrices for part in matrix], "weight")
        return DenseExperts(stacked.view(len(matrices), -1, stacked.shape[1]))

    def _stacked(self, weights: Weights, parts: Sequence[Rows], end: str) -> Tensor:
        sizes = [weights.shapes[f"{part.name}.{end}"] for part in parts]
        counts = [size[0] if part.order is None else len(part.order) for part, size in zip(parts, sizes, strict=True)]
        read = (part.of(weights.files.read(f"{part.name}.{end}")) for part in parts)
        return weights.place([sum(counts), *sizes[0][1:]], read)


KINDS: list[Kind] = [DenseKind()]


def register(kind: Kind) -> None:
    """Asked before those that are there."""
    KINDS.insert(0, kind)


def kind_of(files: Files, name: str) -> Kind:
    """Whose this matrix is; name: with ".weight"."""
    return next(kind for kind in KINDS if kind.holds(files, name))


def is_dense(files: Files, name: str) -> bool:
    return isinstance(kind_of(files, name), DenseKind)


def read_linear(weights: Weights, *parts: Rows, bias: bool = False) -> Linear:
    """A layer of these rows, one below the other. Matrices of several kinds become dense together."""
    return _common(weights, parts).linear(weights, parts, bias)


def read_experts(weights: Weights, matrices: Sequence[Sequence[Rows]]) -> Experts:
    """matrices: the rows of each expert's."""
    return _common(weights, [part for matrix in matrices for part in matrix]).experts(weights, matrices)


def _common(weights: Weights, parts: Sequence[Rows]) -> Kind:
    kinds = [kind_of(weights.files, f"{part.name}.weight") for part in parts]
    return kinds[0] if all(kind is kinds[0] for kind in kinds) else KINDS[-1]
