"""Records device work as CUDA graphs. Leaves everything as it was where one cannot be recorded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

TRY_AGAIN_AFTER = 256  # recordings asked for, and twice as many after each further failure

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Recorder(Protocol):
    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """Calls `run` once, without its work being done, and returns what does that work again and again, each time
        into the result that it returns."""
        ...


class CudaRecorder:
    """Graphs that share their memory, so what one left is gone when another is replayed."""

    def __init__(self) -> None:
        # one for all recordings: the matrix library keeps a workspace for each stream that it ever saw
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._threads = threading.local()
        self._open_pool()

    def _open_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # a pool lives as long as a graph that has memory of it
        self._first = self(lambda: torch.zeros(1, device="cuda"))

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        self._make_thread_ready()
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # other threads may go on with what they do on the device
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
                graph.capture_end()
            except BaseException:
                self._give_up(graph)
                raise
        torch.cuda.current_stream().wait_stream(stream)

        def again() -> Result:
            graph.replay()
            return result

        return again

    def _make_thread_ready(self) -> None:
        """A thread's first use of the matrix library makes what cannot be made within a recording."""
        if getattr(self._threads, "ready", False):
            return
        with torch.cuda.stream(self._stream):
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.zeros(16, 16, dtype=dtype, device="cuda")
                torch.nn.functional.linear(x @ x, x, x[0])
        self._stream.synchronize()
        self._threads.ready = True

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a recording that failed: for the driver, for the allocator and for the random generator."""
        with suppress(RuntimeError):
            graph.capture_end()
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # it has ended, where the recording had
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        if hasattr(self, "_first"):
            del self._first  # in use by graphs as it may be, no other comes into this pool
            self._open_pool()


class Recordings:
    """Counts what is recorded, and says when what failed is tried again. clock: seconds."""

    def __init__(self, record: Recorder, clock: Callable[[], float] = time.perf_counter) -> None:
        self._record = record
        self._clock = clock
        self._asked = self._again_at = 0
        self.made = self.failures = 0
        self.seconds = 0.0

    def make(self, run: Callable[[], Result]) -> Callable[[], Result] | None:
        """None: not now, and nothing has been run."""
        self._asked += 1
        if self._asked <= self._again_at:
            return None
        begun = self._clock()
        try:
            made = self._record(run)
        except RuntimeError as error:  # no memory for it, say
            self._again_at = self._asked + (TRY_AGAIN_AFTER << min(self.failures, 8))
            self.failures += 1
            log.warning("a step is not recorded, and runs as it is: %s", error)
            return None
        finally:
            self.seconds += self._clock() - begun
        self.made += 1
        return made
