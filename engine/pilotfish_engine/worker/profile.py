"""Measures what each part of a step costs here, by the step's own code.

Runs before any request is admitted, over rows whose page tables point into the still unused pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.contract.speculation import PLAIN, CostProfile, Envelope, Settings
from pilotfish_engine.model.memory import ToHost
from pilotfish_engine.speculation.proposer import TargetHidden
from pilotfish_engine.speculation.step import Step, StepResult
from pilotfish_engine.speculation.tree import Candidates, DraftTree, cut
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.worker.graphs import recorder

Result = TypeVar("Result")
Run = Callable[[Rows], Result]

REPEATS = 4
ENOUGH_MS = 150.0  # no more repeats after this long: the longer a pass, the less it varies
CONTEXT = 64  # KV rows a request while the tables are measured
SLOPE_START = (8, 512)  # rows and context of each from which the slope with context is looked for
SLOPE_CLEAR = 0.3  # of a pass's time must be its context's, or the slope is noise: with an 8B model 8 × 512 are 3%
LARGEST_PASS_MS = 500.0  # larger passes are extrapolated: nobody would choose them


@torch.inference_mode()
def measure(step: Step, max_batch: int, envelope: Envelope, num_pages: int) -> CostProfile:
    """max_batch: largest number of running requests. num_pages: of the target's pool. Leaves the state as it found
    it."""
    bench = _Bench(step, max_batch, num_pages)
    try:
        return bench.profile(envelope)
    finally:
        bench.restore()


class _Bench:
    def __init__(self, step: Step, max_batch: int, num_pages: int) -> None:
        self.step = step
        self.max_batch = max_batch
        state = step.state
        pages = torch.arange(state.page_table.numel(), device=state.device) % num_pages + 1
        state.page_table.copy_(pages.view_as(state.page_table))
        self.record = recorder(step)

    def restore(self) -> None:
        state = self.step.state
        state.page_table.zero_()
        state.seq_lens.zero_()
        state.tokens.zero_()

    def profile(self, envelope: Envelope) -> CostProfile:
        self._time(self.max_batch, self._pass_over(1))  # the first passes touch memory and start threads
        verify = self._verify_table(envelope)
        speculates = self.step.proposer is not None and envelope.num_steps > 0
        draft, extend = self._draft_tables() if speculates else ([], [])
        plain_overhead = max(0.0, self._time(1, self._step_of(PLAIN), then=_read) - _at(verify, 1))
        overhead = plain_overhead
        if speculates:
            chain = Settings(num_steps=2, topk=1, num_draft_tokens=3)
            whole = self._time(1, self._step_of(chain), then=_read)
            # a speculative step does all that a plain one does: a smaller difference is noise of the subtraction
            overhead = max(overhead, whole - 2 * draft[0][1] - extend[0][1] - _at(verify, 3))
        return CostProfile(
            verify_ms=tuple(verify),
            kv_ms_per_token=context_slope(self._pass_ms, self.max_batch, self.step.state.length // 2),
            draft_ms=tuple(draft),
            extend_ms=tuple(extend),
            overhead_ms=overhead,
            plain_overhead_ms=plain_overhead,
        )

    def _sizes(self, largest: int) -> list[int]:
        return [size for size in (2**i for i in range(12)) if size < largest] + [largest]

    def _verify_table(self, envelope: Envelope) -> list[tuple[int, float]]:
        nodes = envelope.num_draft_tokens if envelope.num_steps > 0 else 1
        table: list[tuple[int, float]] = []
        for size in self._sizes(self.max_batch * nodes):
            width = -(-size // self.max_batch)
            table.append((size, self._time(-(-size // width), self._pass_over(width))))
            if table[-1][1] > LARGEST_PASS_MS:
                break
        return table

    def _step_of(self, settings: Settings) -> Run[StepResult]:
        return lambda rows: self.step(rows, settings)

    def _pass_over(self, width: int) -> Run[object]:
        """A target pass over `width` nodes a row, as a chain."""
        step = self.step

        def run(rows: Rows) -> object:
            root = step.draft(rows, PLAIN)
            tree = root if width == 1 else _chain(root.token_ids[:, 0], width)
            return step.verify(rows, tree, step.forward(rows, tree), width - 1)

        return run

    def _draft_tables(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """One draft step over n frontier tokens, and the draft-extend over n tokens."""
        short, long = (Settings(num_steps=k, topk=1, num_draft_tokens=k + 1) for k in (1, 3))
        draft: list[tuple[int, float]] = []
        extend: list[tuple[int, float]] = []
        for batch in sorted({1, min(4, self.max_batch), self.max_batch}):
            first = self._time(batch, self._propose(short))
            third = self._time(batch, self._propose(long))
            draft.append((batch, max(0.0, (third - first) / 2)))
            extend.append((batch * 4, self._time(batch, self._advance(long))))
            if third > LARGEST_PASS_MS:
                break
        return draft, extend

    def _propose(self, settings: Settings) -> Run[object]:
        return lambda rows: self.step.draft(rows, settings)

    def _advance(self, settings: Settings) -> Run[object]:
        """The draft-extend after a step in which every row had all its drafts accepted."""
        step, nodes = self.step, settings.num_steps + 1
        assert step.proposer is not None, "only a method that drafts has a draft-extend"
        proposer = step.proposer

        def run(rows: Rows) -> None:
            zeros = torch.zeros(len(rows), nodes, dtype=torch.int64, device=rows.device)
            hidden = torch.zeros(
                len(rows) * nodes, step.target.shape.hidden_size, dtype=step.target.dtype, device=rows.device
            )
            flat = torch.arange(zeros.numel(), device=rows.device).view_as(zeros)
            verdict = Verdict(zeros, zeros[:, 0] + nodes, zeros, flat)
            target = TargetHidden(hidden, tuple(hidden for _ in proposer.aux_layers))
            proposer.accepted(rows, settings, verdict, target)

        return run

    def _pass_ms(self, batch: int, context: int) -> float:
        return self._time(batch, self._pass_over(1), context=context)

    def _time(
        self,
        batch: int,
        run: Run[Result],
        context: int = CONTEXT,
        then: Callable[[Result], object] = lambda result: result,
    ) -> float:
        """Least milliseconds of `run` over the first `batch` rows, and of what is done with its result: what disturbs a
        measurement only adds to it. On a GPU of a recorded graph, as a step is run there."""
        state, rows = self.step.state, self.step.state.rows(range(batch))
        times: list[float] = []

        def again() -> Result:
            return run(rows)

        if self.record is not None:
            state.seq_lens.fill_(min(context, state.length // 2))
            again()  # loads its kernels
            again = self.record(again)
        while len(times) < 2 or (len(times) < REPEATS and sum(times) < ENOUGH_MS):
            state.seq_lens.fill_(min(context, state.length // 2))
            if state.device.type == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            then(again())
            if state.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(self._agreed((time.perf_counter() - begun) * 1e3))
        return min(times)

    def _agreed(self, ms: float) -> float:
        """Rank 0's, so that all ranks measure the same passes."""
        ranks = self.step.ranks
        if ranks is None:
            return ms
        return float(ranks.broadcast(torch.tensor([ms], dtype=torch.float64, device=self.step.state.device)))


def _read(result: StepResult) -> None:
    ToHost([result.accept_lens, result.draft_lens, result.next_token_ids]).read()


def context_slope(pass_ms: Callable[[int, int], float], max_batch: int, longest: int) -> float:
    """Returns milliseconds per KV row read. pass_ms: of a pass over so many rows with so long contexts.

    Rows and contexts grow until reading them takes a clear part of the pass, or there are no more.
    """
    if longest <= CONTEXT:
        return 0.0
    batch, context = SLOPE_START
    while True:
        batch, context = min(batch, max_batch), min(context, longest)
        near, far = pass_ms(batch, CONTEXT), pass_ms(batch, context)
        largest = batch == max_batch and context == longest
        if far >= near * (1 + SLOPE_CLEAR) or largest or far > LARGEST_PASS_MS:
            return max(0.0, (far - near) / (batch * (context - CONTEXT)))
        batch, context = 2 * batch, 2 * context


def _chain(root_ids: torch.Tensor, nodes: int) -> DraftTree:
    """A chain of `nodes` times the root's token under each root. root_ids: int64 [B]."""
    drafts = root_ids.unsqueeze(1).expand(-1, nodes - 1)
    parents = torch.arange(-1, nodes - 2, device=root_ids.device).expand_as(drafts)
    scores = torch.zeros_like(drafts, dtype=torch.float32)
    return cut(root_ids, Candidates(drafts, parents, scores), nodes, nodes - 1)


def _at(table: Sequence[tuple[int, float]], size: int) -> float:
    """The time of the nearest measured size that is not smaller."""
    return next((ms for n, ms in table if n >= size), table[-1][1])
