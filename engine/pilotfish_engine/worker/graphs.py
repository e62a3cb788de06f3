"""Steps as CUDA graphs: a whole step, from the draft to the draft-extend, is recorded once for each batch size,
settings and traits of its rows, and replayed from then on; the host launches one thing where it launched hundreds.

Batches are padded to a bucket with the state's row of padding. The first step of a kind runs as it is, which loads its
kernels; the second is recorded. A step in which the host works (a grammar's masks) is never recorded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.sampling.logprobs import Logprobs
from pilotfish_engine.speculation.step import Step, StepResult

MOST_GRAPHS = 64  # the longest unused one goes: a graph keeps a few MiB of the device's memory
MOST_SEEN = 4096

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
        self._pool = torch.cuda.graph_pool_handle()
        # a pool lives as long as a graph that has memory of it
        self._first = self(lambda: torch.zeros(1, device="cuda"))

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # other threads may go on with what they do on the device
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

        def again() -> Result:
            graph.replay()
            return result

        return again


def recorder(step: Step) -> Recorder | None:
    """None where steps run as they are: on a CPU, and in a group of ranks."""
    return CudaRecorder() if step.state.device.type == "cuda" and step.ranks is None else None


def bucket(batch: int, most: int) -> int:
    """The size that a batch is padded to: a power of two or one and a half of it, at most `most`."""
    power = 1 << (batch - 1).bit_length()
    return min(3 * power // 4 if batch <= 3 * power // 4 else power, most)


@dataclass(frozen=True)
class _Recorded:
    """rows: int64 [bucket], which the recorded step reads."""

    rows: torch.Tensor
    again: Callable[[], StepResult]


Kind = tuple[int, int, int, int, tuple[bool, ...]]


class StepGraphs:
    """Stands where a Step stands. Results are the step's own until the next call."""

    def __init__(self, step: Step, record: Recorder) -> None:
        self._step = step
        self._record = record
        self._graphs: OrderedDict[Kind, _Recorded] = OrderedDict()
        self._seen: set[Kind] = set()

    def __call__(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> StepResult:
        self._step.prepare(rows, host_rows, settings)
        state = self._step.state
        traits = state.traits(host_rows)
        if traits is None:
            return self._step.run(rows, host_rows, settings)
        size = bucket(len(host_rows), state.padding_row)
        kind = (size, settings.num_steps, settings.topk, settings.num_draft_tokens, traits)
        if kind in self._graphs:
            self._graphs.move_to_end(kind)
            graph = self._graphs[kind]
        else:
            padding = [state.padding_row] * (size - len(host_rows))
            graph = self._first(kind, rows.new_empty(size), [*host_rows, *padding], settings)
        graph.rows[: len(host_rows)] = rows
        graph.rows[len(host_rows) :] = state.padding_row
        return _of_first(graph.again(), len(host_rows))

    def _first(self, kind: Kind, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> _Recorded:
        """Of the first two steps of a kind. rows: to be filled before it is run."""

        def run() -> StepResult:
            self._step.state.clear_padding()
            return self._step.run(rows, host_rows, settings)

        if kind not in self._seen:
            if len(self._seen) == MOST_SEEN:
                self._seen.clear()
            self._seen.add(kind)
            return _Recorded(rows, run)
        if len(self._graphs) == MOST_GRAPHS:
            self._graphs.popitem(last=False)
        try:
            again = self._record(run)
        except RuntimeError as error:  # no memory for it, say: nothing has been run yet, and the step itself still can
            log.warning("steps of the kind %s are not recorded: %s", kind, error)
            again = run
        self._graphs[kind] = _Recorded(rows, again)
        return self._graphs[kind]


def _of_first(result: StepResult, batch: int) -> StepResult:
    """Of the batch's first requests."""
    tokens = batch * result.num_draft_tokens
    scores = result.logprobs
    if scores is not None:
        scores = Logprobs(scores.chosen[:tokens], scores.top_ids[:tokens], scores.top[:tokens])
    return replace(
        result,
        next_token_ids=result.next_token_ids[:tokens],
        accept_lens=result.accept_lens[:batch],
        draft_lens=result.draft_lens[:batch],
        logprobs=scores,
    )
