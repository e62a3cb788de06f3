"""Steps as CUDA graphs: a whole step, from the draft to the draft-extend, is recorded once for each batch size,
settings and traits of its rows, and replayed from then on; the host launches one thing where it launched hundreds.

Batches are padded to a bucket with the state's row of padding. The first step of a kind runs as it is, which loads its
kernels; the second is recorded. Where the host works within a step (a grammar's masks, between draft and target pass)
it is two graphs.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Generic, Protocol, TypeVar

import torch

from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.sampling.logprobs import Logprobs
from pilotfish_engine.speculation.step import Step, StepResult
from pilotfish_engine.speculation.tree import DraftTree

MOST_GRAPHS = 64  # the longest unused one goes: each keeps 20 to 40 MiB of the device's memory (SmolLM2 on an H200)
MOST_SEEN = 4096
FIRST_STEP_MS = 20.0  # until it is measured, by the median of RECENT steps
RECENT = 9

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


class _Graph:
    """rows: int64 [bucket], which its steps read; host_rows are those of the first of them, and others of its kind are
    as these."""

    def __init__(self, step: Step, record: Recorder, host_rows: Sequence[int]) -> None:
        self.rows = torch.empty(len(host_rows), dtype=torch.int64, device=step.state.device)
        self._filled_with: torch.Tensor | None = None
        self._step = step
        self._record = record
        self._host_rows = host_rows

    def fill(self, rows: torch.Tensor) -> None:
        """With the batch's, which change seldom."""
        if self._filled_with is not rows:
            self.rows[: len(rows)] = rows
            self.rows[len(rows) :] = self._step.state.padding_row
            self._filled_with = rows

    def _recorded(self, run: Callable[[], Result]) -> Callable[[], Result]:
        try:
            return self._record(run)
        except RuntimeError as error:  # no memory for it, say: nothing has been run yet, and the step itself still can
            log.warning("steps of %d rows are not recorded: %s", len(self.rows), error)
            return run


class _StepGraph(_Graph):
    """Steps of one size, with the same settings."""

    def __init__(self, step: Step, record: Recorder, host_rows: Sequence[int], settings: Settings) -> None:
        super().__init__(step, record, host_rows)
        self._settings = settings
        self._whole: Callable[[], StepResult] | None = None
        # with a grammar: the part before the masks, and the part that reads them
        self._first: Callable[[], DraftTree] | None = None
        self._second: Callable[[], StepResult] | None = None
        self._allowed = self.rows.new_empty(0)

    def __call__(self, host_rows: Sequence[int]) -> StepResult:
        step, settings = self._step, self._settings
        if not step.state.grammars.guides(host_rows):
            self._whole = self._whole or self._recorded(lambda: self._padded(step.run))
            return self._whole()
        self._first = self._first or self._recorded(lambda: self._padded(step.draft))
        tree = self._first()
        allowed = step.allowed(host_rows, tree)
        assert allowed is not None, "a row has a grammar"
        if self._second is None:
            self._allowed = allowed
            self._second = self._recorded(lambda: step.judge(self.rows, self._host_rows, settings, tree, allowed))
        else:
            self._allowed.copy_(allowed)
        return self._second()

    def _padded(self, part: Callable[[torch.Tensor, Sequence[int], Settings], Result]) -> Result:
        self._step.state.clear_padding()
        return part(self.rows, self._host_rows, self._settings)


class _CatchUpGraph(_Graph):
    """A draft's reading of what plain steps left, `width` tokens of a row at most."""

    def __init__(self, step: Step, record: Recorder, host_rows: Sequence[int], width: int) -> None:
        super().__init__(step, record, host_rows)
        self._width = width
        self._counts = torch.zeros_like(self.rows)
        self._read: Callable[[], None] | None = None

    def __call__(self, counts: Sequence[int]) -> None:
        self._counts.copy_(torch.tensor([*counts, *[0] * (len(self.rows) - len(counts))]))
        self._read = self._read or self._recorded(self._run)
        self._read()

    def _run(self) -> None:
        self._step.state.clear_padding()
        self._step.catch_up(self.rows, self._host_rows, self._counts, self._width)


Key = TypeVar("Key")
Graph = TypeVar("Graph", bound=_Graph)


class _Kept(Generic[Key, Graph]):
    """Graphs by kind, those used last."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self._seen: set[Key] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def missing(self, kind: Key) -> int:
        """How many steps of this kind will not be replayed."""
        return 0 if kind in self._graphs else 1 if kind in self._seen else 2

    def get(self, kind: Key, make: Callable[[Recorder], Graph]) -> Graph:
        """The first time one that records nothing, then one that is kept."""
        if kind in self._graphs:
            self._graphs.move_to_end(kind)
            return self._graphs[kind]
        if kind not in self._seen:
            if len(self._seen) == MOST_SEEN:
                self._seen.clear()
            self._seen.add(kind)
            return make(_as_it_is)
        if len(self._graphs) == MOST_GRAPHS:
            self._graphs.popitem(last=False)
        self._graphs[kind] = make(self._record)
        return self._graphs[kind]


class StepGraphs:
    """Stands where a Step stands. Results are the step's own until the next call. replayed: whether the last step was
    graphs that were there before it, and so took as long as others will."""

    def __init__(self, step: Step, record: Recorder, clock: Callable[[], float] = time.perf_counter) -> None:
        self._step = step
        self._clock = clock
        # by the rows with their padding, and the rows' traits
        self.steps = _Kept[tuple[int, Settings, int], _StepGraph](record)
        self.catch_ups = _Kept[tuple[int, int, int], _CatchUpGraph](record)
        self._slow_ms = deque([FIRST_STEP_MS], maxlen=RECENT)  # steps that were not replayed
        self.replayed = False

    def __call__(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> StepResult:
        begun, step, batch = self._clock(), self._step, len(host_rows)
        padding_row = step.state.padding_row
        padded = [*host_rows, *[padding_row] * (bucket(batch, padding_row) - batch)]
        traits = step.state.traits(host_rows)
        counts = step.due(host_rows, settings)
        missing = 0 if counts is None else self._catch_up(rows, padded, traits, counts)
        kind = (len(padded), settings, traits)
        missing += self.steps.missing(kind)
        graph = self.steps.get(kind, lambda record: _StepGraph(step, record, padded, settings))
        graph.fill(rows)
        result = _of_first(graph(padded), batch)
        self.replayed = missing == 0
        if not self.replayed:
            self._slow_ms.append((self._clock() - begun) * 1e3)
        return result

    def _catch_up(self, rows: torch.Tensor, padded: Sequence[int], traits: int, counts: Sequence[int]) -> int:
        """Returns what was missing of it."""
        step, width = self._step, 1 << (max(counts) - 1).bit_length()
        kind = (len(padded), width, traits)
        missing = self.catch_ups.missing(kind)
        graph = self.catch_ups.get(kind, lambda record: _CatchUpGraph(step, record, padded, width))
        graph.fill(rows)
        graph(counts)
        return missing

    def preparing(self, host_rows: Sequence[int]) -> Callable[[Settings], float]:
        """What it takes, in ms, until steps of these rows with given settings are replayed; 0 where they are."""
        state = self._step.state
        size, traits = bucket(len(host_rows), state.padding_row), state.traits(host_rows)

        def price(settings: Settings) -> float:
            missing = self.steps.missing((size, settings, traits))
            return missing * median(self._slow_ms) if missing else 0.0

        return price


def _as_it_is(run: Callable[[], Result]) -> Callable[[], Result]:
    return run


def _of_first(result: StepResult, batch: int) -> StepResult:
    """Of the batch's first requests."""
    if batch == len(result.accept_lens):
        return result
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
