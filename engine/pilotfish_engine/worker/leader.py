"""Leads the ranks of a tensor-parallel group: rank 0 is the process with the scheduler, the others follow it.

What rank 0's worker is told, the followers are told in the same order, through a pipe each; the settings of a step are
rank 0's choice and travel with the call. What is decided from logits is broadcast in the step itself. A rank that dies
or fails ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

import msgspec

from pilotfish_engine.contract.speculation import Envelope, Learned, Settings
from pilotfish_engine.distributed.children import received
from pilotfish_engine.distributed.followers import Followers
from pilotfish_engine.errors import HandoverError
from pilotfish_engine.types import Admission, Batch, GenerationBatchResult, Read, SpeculationReport, WorkerLimits
from pilotfish_engine.worker.target import TargetWorker

NOT_ALONE = (
    "several devices share this engine's model, each with its part of a request; one that has it whole would work"
)


class Load(msgspec.Struct, frozen=True, tag=True):
    """The engine to be from now on: the JSON of an EngineConfig, and of a CostProfile where none is to be measured."""

    config: bytes
    profile: bytes | None = None


class Admit(msgspec.Struct, frozen=True, tag=True):
    admission: Admission


class Run(msgspec.Struct, frozen=True, tag=True):
    batch: Batch
    num_steps: int
    topk: int
    num_draft_tokens: int


class Release(msgspec.Struct, frozen=True, tag=True):
    row: int


Message = Load | Admit | Run | Release


class Leader:
    """Rank 0's types.Worker."""

    def __init__(self, worker: TargetWorker, followers: Followers) -> None:
        self._worker = worker
        self._followers = followers

    @property
    def limits(self) -> WorkerLimits:
        return self._worker.limits

    @property
    def reserve_tokens(self) -> int:
        return self._worker.reserve_tokens

    def admit(self, admission: Admission) -> None:
        self._worker.admit(admission)
        # grammars and logprobs concern the one who decides
        params = msgspec.structs.replace(admission.params, grammar=None, logprobs=None)
        self._followers.send(Admit(replace(admission, params=params, grammar=None)))

    def launch(self, batch: Batch) -> Read:
        settings = self._worker.settings_for(batch)
        self._followers.send(Run(batch, settings.num_steps, settings.topk, settings.num_draft_tokens))
        with self._ending_together():
            read = self._worker.start(batch, settings)

        def result() -> GenerationBatchResult:
            with self._ending_together():
                return read()

        return result

    @contextmanager
    def _ending_together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._followers.await_cause()
            self._followers.end(f"rank 0 failed in a step ({type(error).__name__}: {error}), and the engine with it")
            raise

    def reusable_len(self, row: int, seq_len: int) -> int:
        return self._worker.reusable_len(row, seq_len)

    def release(self, row: int) -> None:
        self._worker.release(row)
        self._followers.send(Release(row))

    def write_out(self, row: int) -> bytes:
        raise HandoverError(NOT_ALONE)

    def read_in(self, row: int, written: bytes) -> None:
        raise HandoverError(NOT_ALONE)

    def set_envelope(self, envelope: Envelope) -> None:
        self._worker.set_envelope(envelope)

    def learn(self, learned: Learned) -> None:
        self._worker.learn(learned)

    def speculation_report(self) -> SpeculationReport:
        return self._worker.speculation_report()


def follow(pipe: BinaryIO, load: Callable[[Load], TargetWorker]) -> None:
    """Does what rank 0 does, until its pipe ends."""
    worker: TargetWorker | None = None
    for message in received(pipe, msgspec.msgpack.Decoder(Message)):
        if isinstance(message, Load):
            worker = load(message)
            continue
        assert worker is not None, "rank 0 says first what to load"
        match message:
            case Admit(admission):
                worker.admit(admission)
            case Run(batch, num_steps, topk, num_draft_tokens):
                settings = Settings(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
                worker.start(batch, settings)()
            case Release(row):
                worker.release(row)
