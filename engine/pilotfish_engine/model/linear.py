"""A matrix applied to a batch of rows: the only place that knows how weights are held and multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from pilotfish_engine import kernels


class Linear:
    """x [N, in] → x · weightᵀ + bias, [N, out]; weight [out, in], bias [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """out_dtype: float32, or that of x."""
        return kernels.linear(x, self.weight, self.bias, out_dtype)
