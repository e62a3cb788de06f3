"""Steps as CUDA graphs: a whole step, from the draft to the draft-extend, is recorded once for each batch size,
settings and traits of its rows, and replayed from then on; the host launches one thing where it launched hundreds.

Batches are padded to a bucket with the state's row of padding. What can win by the profile is recorded at the start
(`ahead`). Of other kinds the first step runs as it is, which loads its kernels; the second is recorded. Where the host
works within a step it is three graphs: a grammar's masks follow the draft, and are made while the target's pass runs.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Generic, TypeVar

import torch

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.model.memory import put
from pilotfish_engine.sampling.logprobs import Logprobs
from pilotfish_engine.speculation.step import Passed, Step, StepResult
from pilotfish_engine.types import Traits
from pilotfish_engine.worker.recording import CudaRecorder, Recorder, Recordings

MOST_GRAPHS = 128  # the longest unused one goes
MOST_SEEN = 4096
FIRST_STEP_MS = 20.0  # until it is measured, by the median of RECENT steps
RECENT = 9

Result = TypeVar("Result")


def recorder(step: Step) -> Recorder | None:
    """None where steps run as they are: on a CPU, and in a group of ranks."""
    return CudaRecorder() if step.state.device.type == "cuda" and step.ranks is None else None


def bucket(batch: int, most: int) -> int:
    """The size that a batch is padded to: a power of two or one and a half of it, at most `most`."""
    power = 1 << (batch - 1).bit_length()
    return min(3 * power // 4 if batch <= 3 * power // 4 else power, most)


class _Part(Generic[Result]):
    """A stretch of tensor code, replayed once it is recorded. recordings: None, never."""

    def __init__(self, recordings: Recordings | None, run: Callable[[], Result]) -> None:
        self._recordings = recordings
        self._run = run
        self._again: Callable[[], Result] | None = None

    def __call__(self) -> Result:
        self.record()
        return self._run() if self._again is None else self._again()

    def record(self) -> None:
        if self._again is None and self._recordings is not None:
            self._again = self._recordings.make(self._run)

    @property
    def recorded(self) -> bool:
        return self._again is not None


class _Graph:
    """rows: of the bucket, which its steps read. Their numbers on the host are those of the first batch, and others of
    its kind are as these."""

    def __init__(self, step: Step, like: Rows) -> None:
        self.rows = replace(like, index=torch.empty(len(like), dtype=torch.int64, device=step.state.device))
        self._filled_with: torch.Tensor | None = None
        self._step = step

    def fill(self, index: torch.Tensor) -> None:
        """With the batch's, which change seldom."""
        if self._filled_with is not index:
            self.rows.index[: len(index)] = index
            self.rows.index[len(index) :] = self._step.state.padding_row
            self._filled_with = index


class _StepGraph(_Graph):
    """Steps of one size, with the same settings."""

    def __init__(self, step: Step, recordings: Recordings | None, like: Rows, settings: Settings) -> None:
        super().__init__(step, like)
        self._recordings = recordings
        self._settings = settings
        self._whole = _Part(recordings, lambda: self._padded(step))
        # with a grammar: before its masks are asked for, while they are made, and what reads them
        self._draft = _Part(recordings, lambda: self._padded(step.draft))
        self._forward: _Part[Passed] | None = None
        self._judge: _Part[StepResult] | None = None
        self._allowed = self.rows.index.new_empty(0)

    def __call__(self, host_rows: Sequence[int]) -> StepResult:
        """host_rows: of the batch at hand."""
        if Traits.GUIDED not in self.rows.traits:
            return self._whole()
        step, grammars = self._step, self._step.state.grammars
        tree = self._draft()
        asked = grammars.ask(host_rows, tree.nodes)
        if not self._draft.recorded:  # the tree is another one each time
            passed = step.forward(self.rows, tree)
            return step.judge(self.rows, self._settings, tree, passed, grammars.allowed(asked))
        if self._forward is None:
            self._forward = _Part(self._recordings, lambda: step.forward(self.rows, tree))
        passed = self._forward()
        allowed = grammars.allowed(asked)
        assert allowed is not None, "a row has a grammar"
        if not self._forward.recorded:
            return step.judge(self.rows, self._settings, tree, passed, allowed)
        if self._judge is None:
            self._allowed = allowed.clone()
            self._judge = _Part(
                self._recordings, lambda: step.judge(self.rows, self._settings, tree, passed, self._allowed)
            )
        else:
            self._allowed.copy_(allowed)
        return self._judge()

    def record(self) -> None:
        """Now, instead of at the next step; without a grammar."""
        self._whole.record()

    def _padded(self, part: Callable[[Rows, Settings], Result]) -> Result:
        self._step.state.clear_padding()
        return part(self.rows, self._settings)


class _CatchUpGraph(_Graph):
    """A draft's reading of what plain steps left, `width` tokens of a row at most."""

    def __init__(self, step: Step, recordings: Recordings | None, like: Rows, width: int) -> None:
        super().__init__(step, like)
        self._width = width
        self._counts = torch.zeros_like(self.rows.index)
        self._read = _Part(recordings, self._run)

    def __call__(self, counts: Sequence[int]) -> None:
        padded = [*counts, *[0] * (len(self.rows) - len(counts))]
        self._counts.copy_(put(padded, torch.int64, self._counts.device))
        self._read()

    def _run(self) -> None:
        assert self._step.proposer is not None, "without a draft nothing is due"
        self._step.state.clear_padding()
        self._step.proposer.catch_up(self.rows, self._counts, self._width)


Key = TypeVar("Key")
Graph = TypeVar("Graph", bound=_Graph)


class _Kept(Generic[Key, Graph]):
    """Graphs by kind, those used last."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self._seen: set[Key] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def missing(self, kind: Key) -> int:
        """How many steps of this kind will not be replayed."""
        return 0 if kind in self._graphs else 1 if kind in self._seen else 2

    def get(self, kind: Key, make: Callable[[Recordings | None], Graph]) -> Graph:
        """The first time one that records nothing, then one that is kept."""
        if kind in self._graphs:
            self._graphs.move_to_end(kind)
            return self._graphs[kind]
        if kind not in self._seen:
            if len(self._seen) == MOST_SEEN:
                self._seen.clear()
            self._seen.add(kind)
            return make(None)
        return self.keep(kind, make(self._recordings))

    def keep(self, kind: Key, graph: Graph) -> Graph:
        if len(self._graphs) == MOST_GRAPHS:
            self._graphs.popitem(last=False)
        self._graphs[kind] = graph
        return graph


class StepGraphs:
    """Stands where a Step stands. Results are the step's own until the next call. replayed: whether the last step was
    graphs that were there before it, and so took as long as others will."""

    def __init__(self, step: Step, record: Recorder, clock: Callable[[], float] = time.perf_counter) -> None:
        self._step = step
        self._clock = clock
        self.recordings = Recordings(record)
        # by the rows with their padding, and the rows' traits
        self.steps = _Kept[tuple[int, Settings, Traits], _StepGraph](self.recordings)
        self.catch_ups = _Kept[tuple[int, int, Traits], _CatchUpGraph](self.recordings)
        self._slow_ms = deque([FIRST_STEP_MS], maxlen=RECENT)  # steps that were not replayed
        self.replayed = False

    @torch.inference_mode()
    def ahead(self, batch: int, settings: Settings) -> None:
        """Records steps of so many rows before any request is there. They are the rows that are admitted first."""
        step, state = self._step, self._step.state
        rows = state.rows(range(bucket(batch, state.padding_row)))
        kind = (len(rows), settings, rows.traits)
        if self.steps.missing(kind):
            step(rows, settings)  # loads its kernels
            graph = self.steps.keep(kind, _StepGraph(step, self.recordings, rows, settings))
            graph.fill(rows.index)
            graph.record()

    def sizes(self) -> list[int]:
        """Every number of rows that a batch is padded to."""
        most = self._step.state.padding_row
        return sorted({bucket(batch, most) for batch in range(1, most + 1)})

    def __call__(self, rows: Rows, settings: Settings) -> StepResult:
        """As Step.catch_up and then the step."""
        begun, step, batch = self._clock(), self._step, len(rows)
        padded = self._padded(rows)
        counts = None if step.proposer is None else step.proposer.due(rows, settings)
        missing = 0 if counts is None else self._catch_up(padded, counts)
        kind = (len(padded), settings, rows.traits)
        missing += self.steps.missing(kind)
        graph = self.steps.get(kind, lambda recordings: _StepGraph(step, recordings, padded, settings))
        graph.fill(rows.index)
        result = _of_first(graph(padded.host), batch)
        self.replayed = missing == 0
        if not self.replayed:
            self._slow_ms.append((self._clock() - begun) * 1e3)
        return result

    def _padded(self, rows: Rows) -> Rows:
        """With rows of padding on the host; on the device they are the graph's."""
        padding_row = self._step.state.padding_row
        return replace(rows, host=rows.host + (padding_row,) * (bucket(len(rows), padding_row) - len(rows)))

    def _catch_up(self, padded: Rows, counts: Sequence[int]) -> int:
        """Returns what was missing of it."""
        step, width = self._step, 1 << (max(counts) - 1).bit_length()
        kind = (len(padded), width, padded.traits)
        missing = self.catch_ups.missing(kind)
        graph = self.catch_ups.get(kind, lambda recordings: _CatchUpGraph(step, recordings, padded, width))
        graph.fill(padded.index)
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
