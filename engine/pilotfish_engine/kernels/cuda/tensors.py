"""What the kernels ask of the tensors that they are given."""

from __future__ import annotations

import torch
from torch import Tensor


def check(dtype: torch.dtype, *tensors: Tensor) -> None:
    """TypeError where one is of another type, or has gaps."""
    for tensor in tensors:
        if tensor.dtype is not dtype or not tensor.is_contiguous():
            raise TypeError(
                f"kernel takes contiguous tensors of {dtype}, got {tensor.dtype} {list(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )
