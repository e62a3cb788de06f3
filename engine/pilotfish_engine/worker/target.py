"""The worker of one rank: prompt chunks and decode steps over the state's rows, with the settings that pay now.

Implements types.Worker. Knows nothing about queues, HTTP or when a request ends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pilotfish_engine.batch.handover import read_in, write_out
from pilotfish_engine.batch.passes import last_places, over_spans
from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.methods import Limits
from pilotfish_engine.contract.speculation import PLAIN, CostProfile, DeviceReport, Envelope, Learned, Settings
from pilotfish_engine.errors import EnvelopeError, NumbersError
from pilotfish_engine.model.memory import ToHost, put
from pilotfish_engine.sampling.draw import NONE
from pilotfish_engine.sampling.logprobs import Logprobs, score
from pilotfish_engine.speculation.proposer import TargetHidden
from pilotfish_engine.speculation.step import Step
from pilotfish_engine.speculation.tree import most_nodes
from pilotfish_engine.types import (
    Admission,
    Batch,
    Chunk,
    ForwardMode,
    GenerationBatchResult,
    LogprobArrays,
    Read,
    SpeculationReport,
    Traits,
    WorkerLimits,
)
from pilotfish_engine.worker.graphs import StepGraphs
from pilotfish_engine.worker.to_host import Moment, logprobs_to_host

SCORED_AT_ONCE = 64  # tokens of a prompt
NOT_FINITE = (
    "the model gives NaN or infinite numbers behind these tokens, so that none can be chosen; another prompt, or "
    "another --dtype, would work"
)


class _Launched:
    """A batch whose result is still to be read, once. Raises what the batch raised, each time it is asked."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._result: GenerationBatchResult | None = None
        self._error: Exception | None = None

    def finish(self) -> None:
        try:
            self._result = self._read()
        except Exception as error:
            self._error = error

    @property
    def is_read(self) -> bool:
        return self._result is not None or self._error is not None

    @property
    def result(self) -> GenerationBatchResult:
        if self._error is not None:
            raise self._error
        assert self._result is not None, "it was read"
        return self._result



log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speculation:
    """How this engine drafts. limits: what an envelope may ask. profile: of costs, as measured at the start."""

    method: str
    limits: Limits
    profile: CostProfile | None


class TargetWorker:
    """One step function, one controller, one state, which is written in inference mode alone: what is made there on
    first use can be written nowhere else. graphs: of the step, where it is not to run as it is. memory_bytes:
    what was reserved, by what for."""

    def __init__(
        self,
        step: Step,
        controller: Controller,
        limits: WorkerLimits,
        speculation: Speculation,
        clock: Callable[[], float] = time.perf_counter,
        graphs: StepGraphs | None = None,
        memory_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self._step = step
        self._graphs = graphs
        self._controller = controller
        self._limits = limits
        self._speculation = speculation
        self._clock = clock
        self._memory_bytes = dict(memory_bytes or {})
        self._ended: Moment | None = None  # the end of the last decode step, if nothing else was run since
        self._unread: deque[_Launched] = deque()
        step.state.grammars.catch_up = self._read_all  # masks are made of what was committed

    @property
    def limits(self) -> WorkerLimits:
        return self._limits

    @property
    def reserve_tokens(self) -> int:
        proposer = self._step.proposer
        envelope = self._controller.envelope
        if proposer is None or envelope.num_steps == 0:
            return 1
        settings = Settings(
            num_steps=envelope.num_steps, topk=envelope.topk, num_draft_tokens=envelope.num_draft_tokens
        )
        return max(proposer.slots_needed(settings), most_nodes(settings, self._limits.max_running_requests))

    @torch.inference_mode()
    def admit(self, admission: Admission) -> None:
        self._step.state.admit(admission)
        if self._step.proposer is not None:
            self._step.proposer.admit(admission.row, admission.cached_len)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        self._step.state.release(row)

    def write_out(self, row: int) -> bytes:
        return write_out(self._step.state, self._step.caches, row)

    @torch.inference_mode()
    def read_in(self, row: int, written: bytes) -> None:
        read_in(self._step.state, self._step.caches, row, written)

    def reusable_len(self, row: int, seq_len: int) -> int:
        proposer = self._step.proposer
        return seq_len if proposer is None else proposer.reusable_len(row, seq_len)

    def set_envelope(self, envelope: Envelope) -> None:
        if misfit := self._speculation.limits.misfit(envelope):
            raise EnvelopeError(misfit.sentence, misfit.field)
        self._controller.set_envelope(envelope)

    def learn(self, learned: Learned) -> None:
        refused = self._controller.learn(learned)
        if refused is not None:
            log.info("what another engine has learnt is not taken over: %s", refused)

    def speculation_report(self) -> SpeculationReport:
        controller = self._controller
        return SpeculationReport(
            method=self._speculation.method,
            effective=controller.effective(),
            envelope=controller.envelope,
            accept_length=controller.accept_length,
            accept=controller.accept,
            profile=self._speculation.profile,
            reason=controller.reason,
            device=self._device_report(),
            findings=controller.findings,
            learned=controller.learned,
        )

    def _device_report(self) -> DeviceReport:
        if self._graphs is None:
            return DeviceReport(memory_bytes=self._memory_bytes)
        recordings = self._graphs.recordings
        return DeviceReport(
            memory_bytes=self._memory_bytes,
            recorded=recordings.made,
            recording_seconds=recordings.seconds,
            recording_failures=recordings.failures,
        )

    def launch(self, batch: Batch) -> Read:
        return self.start(batch, self.settings_for(batch))

    def settings_for(self, batch: Batch) -> Settings:
        """What the controller chooses; asked once for each batch, before it runs."""
        if batch.mode is ForwardMode.EXTEND:
            return PLAIN
        if self._graphs is None:
            return self._controller.choose(len(batch.rows), batch.context_tokens)
        return self._controller.choose(len(batch.rows), batch.context_tokens, self._graphs.preparing(batch.rows))

    @torch.inference_mode()
    def start(self, batch: Batch, settings: Settings) -> Read:
        """As `launch`, with these settings."""
        self._step.state.append_pages(batch.new_pages)
        if batch.mode is ForwardMode.EXTEND:
            self._ended = None
            read = self._extend(batch.chunks)
        else:
            read = self._decode(batch.rows, batch.context_tokens, settings)
        launched = _Launched(read)
        self._unread.append(launched)

        def result() -> GenerationBatchResult:
            while not launched.is_read:  # in order: what one leaves on the host the next goes on from
                self._unread.popleft().finish()
            return launched.result

        return result

    def _read_all(self) -> None:
        while self._unread:
            self._unread.popleft().finish()

    def _decode(self, host_rows: Sequence[int], context_tokens: int, settings: Settings) -> Read:
        rows, device = self._step.state.rows(host_rows), self._step.state.device
        begun, before = Moment(device, self._clock), self._ended
        if self._graphs is None:
            self._step.catch_up(rows, settings)
        result = (self._graphs or self._step)(rows, settings)
        copies = ToHost([result.accept_lens, result.draft_lens, result.next_token_ids])
        logprobs = None if result.logprobs is None else logprobs_to_host(result.logprobs)
        ended = self._ended = Moment(device, self._clock)
        # one that was recorded, or ran before it was, says nothing of the others
        usual = self._graphs is None or self._graphs.replayed

        def read() -> GenerationBatchResult:
            accept_lens, draft_lens, next_token_ids = (copy.tolist() for copy in copies.read())
            host_ms = None if before is None else before.ms_until(begun)
            step_ms = begun.ms_until(ended) if usual else None
            self._controller.observe(settings, context_tokens, accept_lens, step_ms, host_ms)
            done = GenerationBatchResult(
                next_token_ids=next_token_ids,
                accept_lens=accept_lens,
                draft_lens=draft_lens,
                num_draft_tokens=result.num_draft_tokens,
                logprobs=None if logprobs is None else logprobs(),
            )
            return replace(done, errors=self._faults(host_rows, done.committed()))

        return read

    def _faults(self, host_rows: Sequence[int], committed: Sequence[Sequence[int]]) -> dict[int, Exception]:
        """Why rows cannot go on behind these tokens, by their place in the batch; grammars have followed them."""
        broken = {at: NumbersError(NOT_FINITE) for at, tokens in enumerate(committed) if NONE in tokens}
        return {**broken, **self._step.state.grammars.advance(host_rows, committed)}

    def _extend(self, chunks: Sequence[Chunk]) -> Read:
        state, step = self._step.state, self._step
        rows, ends = state.rows([chunk.row for chunk in chunks]), [chunk.end for chunk in chunks]
        inputs = over_spans(state, rows, [chunk.start for chunk in chunks], ends)
        aux_layers = step.proposer.aux_layers if step.proposer is not None else ()
        hidden, aux = step.target.forward(inputs, step.kv, aux_layers)
        state.seq_lens[rows.index] = put(ends, torch.int64, state.device)
        first_tokens = self._first_tokens(chunks, hidden[last_places(inputs)])
        scored = self._prompt_logprobs(chunks, hidden)
        if step.proposer is not None:
            step.proposer.extend(chunks, TargetHidden(hidden, tuple(aux)))

        def read() -> GenerationBatchResult:
            return replace(first_tokens(), prompt_logprobs={place: found() for place, found in scored.items()})

        return read

    def _prompt_logprobs(self, chunks: Sequence[Chunk], hidden: torch.Tensor) -> dict[int, Callable[[], LogprobArrays]]:
        """By the chunk's place; hidden: [N, H], of all tokens of the chunks. Logits are made of a few tokens at a time:
        of all they may be gigabytes."""
        found: dict[int, Callable[[], LogprobArrays]] = {}
        end = 0
        for place, chunk in enumerate(chunks):
            begin, end = end, end + chunk.end - chunk.start
            count = self._step.state.scored_prompt_rows(chunk.row, chunk.start, chunk.end)
            if count == 0:
                continue
            states = hidden[begin : begin + count]
            followers = self._step.state.tokens[chunk.row, chunk.start + 1 : chunk.start + 1 + count]
            parts = [
                score(self._step.target.logits(states[at : at + SCORED_AT_ONCE]), followers[at : at + SCORED_AT_ONCE])
                for at in range(0, count, SCORED_AT_ONCE)
            ]
            found[place] = logprobs_to_host(
                Logprobs(
                    torch.cat([part.chosen for part in parts]),
                    torch.cat([part.top_ids for part in parts]),
                    torch.cat([part.top for part in parts]),
                )
            )
        return found

    def _first_tokens(self, chunks: Sequence[Chunk], hidden: torch.Tensor) -> Read:
        """Of the rows whose last chunk this was; hidden: [B, H], of each chunk's last token."""
        state = self._step.state
        sampled = [i for i, chunk in enumerate(chunks) if chunk.last]
        which = put(sampled, torch.int64, state.device)
        rows = state.rows([chunks[i].row for i in sampled])
        at = rows.index, state.seq_lens[rows.index]

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(len(chunks), *values.shape[1:]).index_copy_(0, which, values)

        logits = self._step.target.logits(hidden[which])
        allowed = state.grammars.allowed(state.grammars.ask(rows.host))
        drawn = state.choose(logits, rows, at[1], allowed=allowed)
        if self._step.ranks is not None:
            drawn = self._step.ranks.broadcast(drawn)
        known = drawn.clamp_min(0)
        state.tokens[at] = known
        state.count(rows, known.unsqueeze(1), torch.ones_like(known))
        logprobs = None
        if Traits.SCORED in rows.traits:
            found = score(logits, known)
            logprobs = logprobs_to_host(Logprobs(spread(found.chosen), spread(found.top_ids), spread(found.top)))
        copies = ToHost([spread(drawn)])

        def read() -> GenerationBatchResult:
            next_token_ids = copies.read()[0].tolist()
            errors = self._faults(rows.host, [[next_token_ids[i]] for i in sampled])
            return GenerationBatchResult(
                next_token_ids=next_token_ids,
                accept_lens=[int(chunk.last) for chunk in chunks],
                draft_lens=[0] * len(chunks),
                num_draft_tokens=1,
                logprobs=None if logprobs is None else logprobs(),
                errors={sampled[i]: error for i, error in errors.items()},
            )

        return read
