"""Brings results to the host while the device goes on. Tells how long the device took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pilotfish_engine.sampling.logprobs import Logprobs
from pilotfish_engine.types import LogprobArrays


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


def logprobs_to_host(found: Logprobs) -> Callable[[], LogprobArrays]:
    """Waits when it is called."""
    copies = ToHost([found.chosen, found.top_ids, found.top])

    def read() -> LogprobArrays:
        chosen, top_ids, top = copies.read()
        return LogprobArrays(chosen.tolist(), top_ids.tolist(), top.tolist())

    return read


class Moment:
    """When the device has come to what is asked of it next; on a CPU, by `clock` in seconds, that is now."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._at = 0.0
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._at = clock()

    def ms_until(self, later: Moment) -> float:
        """Both are past."""
        if self._event is None or later._event is None:
            return (later._at - self._at) * 1e3
        return float(self._event.elapsed_time(later._event))
