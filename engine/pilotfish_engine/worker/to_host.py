"""Brings results to the host while the device goes on. Tells how long the device took."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pilotfish_engine.model.memory import ToHost
from pilotfish_engine.sampling.logprobs import Logprobs
from pilotfish_engine.types import LogprobArrays


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
