"""A Worker without a model: the token at a position depends on the first of the prompt, on the position and on nothing
else, and a step commits as many tokens as it is told. It checks what the scheduler owes a worker: pages for every row
that a step may write, shared ones never written, chunks in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pilotfish_engine.contract.speculation import Effective, Envelope, Learned
from pilotfish_engine.errors import HandoverError
from pilotfish_engine.messages import Output, SamplingParams, Submit
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.types import (
    Admission,
    Batch,
    Chunk,
    ForwardMode,
    GenerationBatchResult,
    Read,
    SpeculationReport,
    WorkerLimits,
)


def token(first: int, position: int) -> int:
    return 10 + (first * 7 + position * 13) % 50


def answer(prompt: Sequence[int], count: int) -> list[int]:
    return [token(prompt[0], len(prompt) + number) for number in range(count)]


@dataclass
class Row:
    tokens: list[int]
    pages: list[int]
    cached: int
    computed: int
    prompt_len: int


@dataclass
class Counting:
    """tokens_a_step: of a decode step, all but one of them drafts. broken: a call raises. extended: prompt tokens that
    went through, once for each time."""

    limits: WorkerLimits = field(default_factory=lambda: WorkerLimits(4, 64, 4, 8))
    tokens_a_step: int = 1
    broken: bool = False
    extended: int = 0
    batches: list[Batch] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    before_call: Callable[[Batch], None] = lambda batch: None

    @property
    def reserve_tokens(self) -> int:
        return self.tokens_a_step

    def admit(self, admission: Admission) -> None:
        assert admission.row not in self.rows
        known, pages = list(admission.token_ids), list(admission.pages)
        self.rows[admission.row] = Row(known, pages, admission.cached_len, admission.cached_len, admission.prompt_len)

    def release(self, row: int) -> None:
        del self.rows[row]

    def write_out(self, row: int) -> bytes:
        raise HandoverError("it only counts; an engine would work")

    def read_in(self, row: int, written: bytes) -> None:
        raise HandoverError("it only counts; an engine would work")

    def reusable_len(self, row: int, seq_len: int) -> int:
        return min(seq_len, self.rows[row].computed)

    def set_envelope(self, envelope: Envelope) -> None:
        self.tokens_a_step = envelope.num_steps + 1

    def launch(self, batch: Batch) -> Read:
        self.before_call(batch)
        self.batches.append(batch)
        if self.broken:
            raise RuntimeError("no memory")
        for added in batch.new_pages:
            assert added.first == len(self.rows[added.row].pages)
            self.rows[added.row].pages += added.pages
        # a row may be released meanwhile
        pages = [set(row.pages[row.cached // self.limits.page_size :]) for row in list(self.rows.values())]
        assert sum(map(len, pages)) == len(set().union(*pages)), "two requests write the same page"
        result = self._extend(batch.chunks) if batch.mode is ForwardMode.EXTEND else self._decode(batch.rows)
        return lambda: result

    def _extend(self, chunks: Sequence[Chunk]) -> GenerationBatchResult:
        found = []
        for chunk in chunks:
            row = self.rows[chunk.row]
            assert chunk.start == row.computed
            assert chunk.last == (chunk.end == len(row.tokens))
            self._writes(row, chunk.end)
            row.computed = chunk.end
            self.extended += chunk.end - chunk.start
            found.append(self._next(row, 1)[0] if chunk.last else 0)
        last = [int(chunk.last) for chunk in chunks]
        return GenerationBatchResult(found, last, [0] * len(found), 1)

    def _decode(self, rows: Sequence[int]) -> GenerationBatchResult:
        found: list[int] = []
        for number in rows:
            row = self.rows[number]
            assert row.computed == len(row.tokens) - 1
            self._writes(row, row.computed + self.tokens_a_step)
            found += self._next(row, self.tokens_a_step)
            row.computed = len(row.tokens) - 1
        counts = [self.tokens_a_step] * len(rows)
        drafted = [self.tokens_a_step - 1] * len(rows)
        return GenerationBatchResult(found, counts, drafted, self.tokens_a_step)

    def _writes(self, row: Row, end: int) -> None:
        assert end <= len(row.pages) * self.limits.page_size, "a step writes past the pages of its request"

    def _next(self, row: Row, count: int) -> list[int]:
        found = [token(row.tokens[0], len(row.tokens) + number) for number in range(count)]
        row.tokens += found
        return found

    def learn(self, learned: Learned) -> None:
        raise AssertionError("nobody shares times here")

    def speculation_report(self) -> SpeculationReport:
        effective = Effective(num_steps=0, topk=1, num_draft_tokens=1, disable_threshold=None, active=False)
        return SpeculationReport("None", effective, Envelope(), None, (), None, "")


def prompt_of(name: str, length: int) -> list[int]:
    """Of the same name the same; different names share no prefix."""
    first = sum(ord(letter) * 31**at for at, letter in enumerate(name)) % 100003
    return [first + number for number in range(length)]


def submit(
    scheduler: Scheduler, name: str, prompt_len: int, max_tokens: int = 8, priority: int = 0, **params: object
) -> list[int]:
    """The prompt."""
    prompt = prompt_of(name, prompt_len)
    wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)  # type: ignore[arg-type]
    scheduler.submit(Submit(request_id=name, prompt=prompt, params=wanted, priority=priority))
    return prompt


def drain(scheduler: Scheduler, limit: int = 400) -> dict[str, list[Output]]:
    """The outputs of each request, pages checked after every step."""
    outputs: dict[str, list[Output]] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            return outputs
        for output in scheduler.step():
            outputs.setdefault(output.request_id, []).append(output)
        scheduler.check()
    raise AssertionError("stuck")


def tokens(outputs: Sequence[Output]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]
