"""One engine over a tiny checkpoint, with everything watched: NaN in every unused KV row, page accounts after each
step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import Envelope, EnvelopeUpdate, Learned
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.messages import Output, SamplingParams, Submit, TokenLogprob
from pilotfish_engine.model.inputs import KVCache
from pilotfish_engine.scheduler.preparing import GrammarCompiler
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.scheduler.stops import StopTextFactory
from pilotfish_engine.types import (
    Admission,
    Batch,
    ForwardMode,
    GenerationBatchResult,
    Read,
    SpeculationReport,
    WorkerLimits,
)

MAX_MODEL_LEN = 96
MAX_RUNNING = 6
NUM_STEPS = 4


def fixed(num_steps: int, topk: int) -> EnvelopeUpdate:
    """Exactly these settings at every load: a chain, or a tree of twice as many nodes."""
    nodes = num_steps + 1 if topk == 1 else 2 * num_steps + 2
    return EnvelopeUpdate(
        num_steps=num_steps, topk=topk, num_draft_tokens=max(2, nodes), tuning="Fixed", disable_threshold=1000
    )


@dataclass
class Watched:
    """A Worker that keeps what its decode steps returned. tighter: limits of which it says less than it could."""

    parts: Parts
    steps: list[tuple[Batch, GenerationBatchResult]] = field(default_factory=list)
    tighter: dict[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> WorkerLimits:
        return replace(self.parts.worker.limits, **self.tighter)

    @property
    def reserve_tokens(self) -> int:
        return self.parts.worker.reserve_tokens

    def admit(self, admission: Admission) -> None:
        self.parts.worker.admit(admission)

    def launch(self, batch: Batch) -> Read:
        launched = self.parts.worker.launch(batch)

        def read() -> GenerationBatchResult:
            result = launched()
            if batch.mode is ForwardMode.DECODE:
                self.steps.append((batch, result))
            return result

        return read

    def reusable_len(self, row: int, seq_len: int) -> int:
        return self.parts.worker.reusable_len(row, seq_len)

    def release(self, row: int) -> None:
        self.parts.worker.release(row)

    def write_out(self, row: int) -> bytes:
        return self.parts.worker.write_out(row)

    def read_in(self, row: int, written: bytes) -> None:
        self.parts.worker.read_in(row, written)

    def set_envelope(self, envelope: Envelope) -> None:
        self.parts.worker.set_envelope(envelope)

    def learn(self, learned: Learned) -> None:
        raise AssertionError("nobody shares times here")

    def speculation_report(self) -> SpeculationReport:
        return self.parts.worker.speculation_report()


@dataclass
class Answer:
    """logprobs: None for a token that came without."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    last: Output | None = None

    @property
    def finish_reason(self) -> str | None:
        return None if self.last is None else self.last.finish_reason


class Harness:
    """`scheduler` is new for every case; the loaded models are shared, and their pools start as NaN. tighter: as
    Watched takes it."""

    def __init__(
        self,
        parts: Parts,
        chunk_size: int = 512,
        overlap: bool = False,
        stop_text: StopTextFactory | None = None,
        grammars: GrammarCompiler | None = None,
        **tighter: Any,
    ) -> None:
        self.parts = parts
        self.worker = Watched(parts, tighter=tighter)
        self.scheduler = Scheduler(self.worker, chunk_size, stop_text or parts.stop_text, overlap, grammars=grammars)
        self.answers: dict[str, Answer] = {}
        self._ids = 0
        self.faulty: set[str] = set()  # requests that may end with an error
        for cache in self.caches():
            cache.k.fill_(torch.nan)
            cache.v.fill_(torch.nan)

    def caches(self) -> Iterator[KVCache]:
        yield self.parts.step.kv
        own = getattr(self.parts.step.proposer, "kv", None)
        if own is not None:
            yield own

    def submit(self, prompt: Sequence[int], **params: Any) -> str:
        values: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0} | params
        return self.submit_params(prompt, SamplingParams(**values))

    def submit_params(self, prompt: Sequence[int], params: SamplingParams, priority: int = 0) -> str:
        self._ids += 1
        request_id = f"r{self._ids}"
        self.answers[request_id] = Answer()
        self.scheduler.submit(Submit(request_id=request_id, prompt=list(prompt), params=params, priority=priority))
        return request_id

    def step(self) -> list[Output]:
        outputs = self.scheduler.step()
        self.scheduler.check()
        for output in outputs:
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, "an output came after the end"
            assert output.token_ids or output.finish_reason, "an output says nothing"
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs or [None] * len(output.token_ids)
            answer.last = output
            assert output.error is None or output.request_id in self.faulty, output.error
        return outputs

    def drain(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def run(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[int]]:
        ids = [self.submit(prompt, **params) for prompt in prompts]
        self.drain()
        assert all(self.answers[i].finish_reason in ("stop", "length") for i in ids), self.answers
        return [self.answers[i].token_ids for i in ids]


def load(
    target: Path, method: str, draft: Path | None, page_size: int, num_steps: int = NUM_STEPS, topk: int = 4
) -> Parts:
    return assemble(configuration(target, method, draft, page_size, num_steps, topk))


def configuration(
    target: Path, method: str, draft: Path | None, page_size: int, num_steps: int, topk: int, ranks: int = 1
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(source=str(target), dtype="float32", max_model_len=MAX_MODEL_LEN),
        speculation=SpeculationConfig(
            method=method,
            draft=None if draft is None else str(draft),
            envelope=Envelope(num_steps=num_steps, topk=topk, num_draft_tokens=2 * NUM_STEPS + 2),
        ),
        capacity=CapacityConfig(max_running_requests=MAX_RUNNING, page_size=page_size, tensor_parallel_size=ranks),
    )
