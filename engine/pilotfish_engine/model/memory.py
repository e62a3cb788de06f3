"""Says where weights and caches lie, and brings the host's lists there and results back.

On a CPU weights lie in huge pages where the system gives them, since a pass that reads hundreds of megabytes once would
otherwise wait for address translation (measured: a third of the time of the linear layers).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
ALIGNMENT = 64  # bytes, a cache line


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor, in huge pages where it is on a CPU and fills one."""
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or num_bytes < HUGE_PAGE:
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes].view(dtype).view(*size)


def put(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Puts a list of the host's on a device. That is in order with its work, and waits for none of it."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cpu" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class ToHost:
    """Tensors on their way: they may be overwritten by what comes after. `read` waits for them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._copies = [tensor.clone() for tensor in tensors]

    def read(self) -> list[Tensor]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


class Arena:
    """Tensors of one dtype side by side in the order in which they are taken, each on a cache line of its own."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """sizes: the number of elements of every tensor that will be taken, in any order."""
        self._line = ALIGNMENT // dtype.itemsize
        self._memory = zeros([sum(self._lines(size) for size in sizes)], dtype, device)
        self._taken = 0

    def has(self, size: Sequence[int]) -> bool:
        """Whether there is room for a tensor of this size."""
        return self._taken + math.prod(size) <= self._memory.numel()

    def take(self, size: Sequence[int]) -> Tensor:
        count = math.prod(size)
        tensor = self._memory[self._taken : self._taken + count].view(*size)
        self._taken += self._lines(count)
        return tensor

    def _lines(self, count: int) -> int:
        return -(-count // self._line) * self._line
