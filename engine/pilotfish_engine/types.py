"""Defines the frozen types between scheduler, worker and speculation, one per phase, and their protocols.

Torch-free, so that the scheduler can be read and tested without a model.
A *row* is a place in the worker's fixed-shape state; a running request owns one from admission to release.
A *slot* is one KV position of the pool: page * page_size + offset. Page 0 is scratch: padding writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import TYPE_CHECKING, Protocol

from pilotfish_engine.contract.speculation import CostProfile, DeviceReport, Effective, Envelope, Finding, Learned
from pilotfish_engine.messages import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher
    from numpy.typing import NDArray


class Traits(IntFlag):
    """What decides, beside their number, which code a step runs for its rows: a bit for what one of them needs."""

    NONE = 0
    SAMPLED = 1
    FILTERED = 2  # by top-k, top-p or min-p
    SCORED = 4  # its log-probabilities are wanted
    GUIDED = 8  # by a grammar
    BIASED = 16
    PENALISED = 32  # for the tokens that it has
    BOUNDED = 64  # by a minimum length


class MaskOfNode(Protocol):
    """How the mask of a node is made: by the library of `inner`, where there is one, and then by `finish`."""

    @property
    def inner(self) -> LLMatcher | None: ...

    def finish(self, mask: NDArray[np.uint8]) -> None:
        """In place, a bit for each token, lowest first."""
        ...


class GrammarMatcher(Protocol):
    """One answer's place in its grammar. error: why it cannot go on, or None."""

    @property
    def error(self) -> str | None: ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were committed."""
        ...

    def ask(self, token_ids: Sequence[int], parents: Sequence[int]) -> Sequence[MaskOfNode | None]:
        """Says what makes the mask of each node under the last committed token. None: any may follow."""
        ...


class CompiledGrammar(Protocol):
    def start(self, answer: Sequence[int], stop_token_ids: Sequence[int], ignore_eos: bool) -> GrammarMatcher:
        """A matcher behind the tokens of an answer."""
        ...


class ForwardMode(Enum):
    EXTEND = "extend"  # prompt chunks
    DECODE = "decode"  # one speculative or plain step


@dataclass(frozen=True)
class Admission:
    """A request gets a row: `cached_len` KV rows are already right, in `pages` (all reserved pages, in order).
    prompt_len: how many of token_ids are the prompt; end_token_ids: those that end the answer."""

    row: int
    token_ids: Sequence[int]  # prompt, and after a retraction the tokens generated before it
    cached_len: int
    pages: Sequence[int]
    params: SamplingParams
    seed: int
    prompt_len: int = 0
    end_token_ids: Sequence[int] = ()
    grammar: CompiledGrammar | None = None


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a row's known tokens go through the model; `last`: a token is sampled from the final
    one."""

    row: int
    start: int
    end: int
    last: bool


@dataclass(frozen=True)
class NewPages:
    """Pages appended to a row's table, the first of them at index `first`."""

    row: int
    first: int
    pages: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """One call of the worker. DECODE uses `rows`; EXTEND uses `chunks`. Every row has `reserve_tokens` slots reserved
    past its last known token."""

    mode: ForwardMode
    rows: Sequence[int] = ()
    chunks: Sequence[Chunk] = ()
    new_pages: Sequence[NewPages] = ()
    context_tokens: int = 0  # KV rows of the batch together, as far as the host knows


@dataclass(frozen=True)
class LogprobArrays:
    """Natural logarithms, strided as next_token_ids: of each token, and of the likeliest at its place, best first."""

    chosen: Sequence[float]
    top_ids: Sequence[Sequence[int]]
    top: Sequence[Sequence[float]]


@dataclass(frozen=True)
class GenerationBatchResult:
    """What a step committed, in the flat strided form of every method.

    next_token_ids: [batch_size * num_draft_tokens]; request i owns the stride from i * num_draft_tokens, its first
    accept_lens[i] entries are committed, the rest is padding. accept_lens: [batch_size], ≥ 1 for DECODE; for EXTEND 1
    on chunks that are `last`, 0 on the others. draft_lens: [batch_size], draft tokens verified.
    logprobs: where a request of the batch asks for them. prompt_logprobs: by place in the batch, of the prompt's tokens
    that come one after those of the chunk. errors: by place in the batch, why a request cannot go on: a RequestError
    where that is the client's doing.
    """

    next_token_ids: Sequence[int]
    accept_lens: Sequence[int]
    draft_lens: Sequence[int]
    num_draft_tokens: int
    logprobs: LogprobArrays | None = None
    prompt_logprobs: Mapping[int, LogprobArrays] = field(default_factory=dict)
    errors: Mapping[int, Exception] = field(default_factory=dict)

    def committed(self) -> list[list[int]]:
        """The committed tokens of each request, out of the strided form."""
        flat, stride = self.next_token_ids, self.num_draft_tokens
        return [list(flat[i * stride : i * stride + n]) for i, n in enumerate(self.accept_lens)]


Read = Callable[[], GenerationBatchResult]  # waits; raises what the batch raised; the same each time


@dataclass(frozen=True)
class WorkerLimits:
    """lookahead: how many tokens after it a KV row of any pool depends on. vocab_size: tokens that the model can read
    and say; None: not known. memory_sum: what takes the device's memory, in a sentence."""

    max_running_requests: int
    max_model_len: int
    page_size: int
    num_pages: int  # scratch page 0 not counted: pages 1 … num_pages are allocatable
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    lookahead: int = 0
    vocab_size: int | None = None
    memory_sum: str = ""


class Worker(Protocol):
    """Runs batches for the scheduler. Which method speculates, or none, does not show here."""

    @property
    def limits(self) -> WorkerLimits: ...

    @property
    def reserve_tokens(self) -> int:
        """Slots that a DECODE step may write past a row's known tokens. They are enough for every setting within the
        envelope."""
        ...

    def admit(self, admission: Admission) -> None:
        """Raises RequestError on parameters that cannot be; the row is released then."""
        ...

    def launch(self, batch: Batch) -> Read:
        """Starts the batch behind those that were launched before it. What it gives is read, in order of launching,
        when it is wanted; until then the device may be at work. Rows that are admitted or released meanwhile are
        those that no batch under way has."""
        ...

    def reusable_len(self, row: int, seq_len: int) -> int:
        """How many of the row's first `seq_len` KV rows are right in every pool. They may enter the prefix cache."""
        ...

    def release(self, row: int) -> None: ...

    def write_out(self, row: int) -> bytes:
        """All that is kept of a row that decodes. It is in no batch under way. Raises HandoverError."""
        ...

    def read_in(self, row: int, written: bytes) -> None:
        """Behind `admit` of the same tokens, in pages that are nobody else's: the row decodes from here on. Raises
        HandoverError where another engine wrote it; then the row is as it was."""
        ...

    def set_envelope(self, envelope: Envelope) -> None:
        """Takes effect at the next step. Raises EnvelopeError on what the method cannot do; then nothing changes."""
        ...

    def learn(self, learned: Learned) -> None:
        """Takes over what another engine of the same kind knows of its times; of another kind it is ignored."""
        ...

    def speculation_report(self) -> SpeculationReport: ...


@dataclass(frozen=True)
class SpeculationReport:
    """The worker's share of contract.EngineReport."""

    method: str
    effective: Effective
    envelope: Envelope
    accept_length: float | None
    accept: tuple[float, ...]
    profile: CostProfile | None
    reason: str
    device: DeviceReport = field(default_factory=DeviceReport)
    findings: tuple[Finding, ...] = ()
    learned: Learned | None = None
