"""Holds adaptive beside plain and every chain, by batch and share of drafts accepted. Contexts are equal.

Of each run only what lies between FROM and TO tokens of its answers counts, so that contexts are the same for all
settings. A chain's step takes as long whatever is accepted, so each is timed once at a load; its rate is what its steps
commit in the mean, which is known, over that time. Adaptive's is the mean of what its steps commit by their settings,
so that no luck of the draws is in either. Its first LEARNS_S seconds at a load do not count.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.forced import Acceptance, share_for
from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.speculation import EnvelopeUpdate, Settings
from pilotfish_engine.engine import Parts
from pilotfish_engine.messages import SamplingParams, Submit
from pilotfish_engine.scheduler.scheduler import Scheduler

LENGTHS = (1.2, 1.6, 2.0, 2.6, 3.2)  # tokens that a chain of 3 commits in a step
DEEPEST = 5
PROMPT = 128
FROM, TO = 64, 264
LEARNS_S, TIMED_S = 2.0, 2.5
ADAPTIVE = EnvelopeUpdate(
    num_steps=DEEPEST, topk=1, num_draft_tokens=DEEPEST + 1, tuning="Adaptive", disable_threshold="Auto"
)


def static(num_steps: int) -> EnvelopeUpdate:
    if num_steps == 0:
        return EnvelopeUpdate(num_steps=0, tuning="Fixed")
    return EnvelopeUpdate(
        num_steps=num_steps, topk=1, num_draft_tokens=num_steps + 1, tuning="Fixed", disable_threshold=4096
    )


@dataclass
class Decided:
    """A step: what ran, what the last decision was and promised, and what came of it."""

    ran: int
    chosen: int
    promised: float
    step_ms: float | None = None
    host_ms: float | None = None
    committed: int = 0


class Watched:
    """Stands where a controller stands, and keeps what it is asked and told."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.steps: list[Decided] = []
        self.committed = 0  # tokens of all steps that were observed
        self._observed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def choose(self, *arguments: Any) -> Settings:
        settings = self._controller.choose(*arguments)
        choice = self._controller.choice
        assert choice is not None, "a decision has been made"
        self.steps.append(Decided(settings.num_steps, choice.settings.num_steps, choice.tokens_per_second))
        return settings

    def observe(
        self,
        settings: Settings,
        context_tokens: int,
        accept_lens: Sequence[int],
        step_ms: float | None = None,
        host_ms: float | None = None,
    ) -> None:
        step = self.steps[self._observed]
        step.step_ms, step.host_ms, step.committed = step_ms, host_ms, sum(accept_lens)
        self._observed += 1
        self.committed += step.committed
        self._controller.observe(settings, context_tokens, accept_lens, step_ms, host_ms)


@dataclass(frozen=True)
class Timed:
    """seconds: of `steps`. emitted: tokens that came meanwhile, a step's more or less."""

    seconds: float
    steps: Sequence[Decided]
    emitted: int


class Load:
    """So many requests at once, again and again the same ones, whose prompts are cached."""

    def __init__(self, parts: Parts, watched: Watched, batch: int, overlap: bool) -> None:
        self.batch = batch
        self._scheduler = Scheduler(parts.worker, parts.chunk_size, parts.stop_text, overlap)
        self._watched = watched
        drawn = random.Random(batch)
        self._prompts = [[drawn.randrange(1000, 100000) for _ in range(PROMPT)] for _ in range(batch)]

    def set(self, envelope: EnvelopeUpdate) -> None:
        self._scheduler.set_envelope(envelope)

    def run(self) -> Timed:
        scheduler = self._scheduler
        params = SamplingParams(max_tokens=4 * TO, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(self._prompts):
            scheduler.submit(Submit(request_id=str(number), prompt=prompt, params=params))
        zero = self._watched.committed
        self._until(zero + FROM * self.batch)
        torch.cuda.synchronize()
        begun, first, before = time.perf_counter(), len(self._watched.steps), self._watched.committed
        self._until(zero + TO * self.batch)
        torch.cuda.synchronize()
        timed = Timed(time.perf_counter() - begun, self._watched.steps[first:], self._watched.committed - before)
        for number in range(self.batch):
            scheduler.abort(str(number))
        while scheduler.has_work:
            scheduler.step()
        return timed

    def close(self) -> None:
        self._scheduler.flush_cache()

    def _until(self, committed: int) -> None:
        while self._watched.committed < committed:
            self._scheduler.step()


@dataclass
class Cell:
    """rates: tokens/s by num_steps, 0 being plain. of_best: adaptive over the best of them, timed again right after.
    promised: by adaptive over what came. ran: share of its steps by num_steps."""

    batch: int
    length: float
    rates: list[float]
    adaptive: float
    adaptive_with_luck: float
    best_again: float
    promised: float
    ran: dict[int, float]
    steps: list[Decided]

    @property
    def of_best(self) -> float:
        return self.adaptive / max(self.best_again, *self.rates)


def committed(share: float, num_steps: int) -> float:
    """Tokens a step of one request."""
    return sum(share**depth for depth in range(num_steps + 1))


def rate(batch: int, share: float, runs: Sequence[Timed]) -> float:
    """Tokens/s without the draws' luck."""
    made = sum(committed(share, step.ran) for run in runs for step in run.steps)
    return batch * made / sum(run.seconds for run in runs)


def measure(parts: Parts, acceptance: Acceptance, batches: Sequence[int], overlap: bool) -> Iterator[Cell]:
    watched = Watched(parts.worker._controller)
    parts.worker._controller = watched  # type: ignore[assignment]
    for batch in batches:
        load = Load(parts, watched, batch, overlap)
        acceptance.set(share_for(LENGTHS[-1], 3))
        chains: list[list[Timed]] = []
        for num_steps in range(DEEPEST + 1):
            load.set(static(num_steps))
            chains.append([load.run() for _ in range(2 if batch < 32 else 1)])
        for length in LENGTHS:
            share = share_for(length, 3)
            acceptance.set(share)
            yield _cell(load, watched, share, length, chains)
        load.close()
    parts.worker._controller = watched._controller


def _cell(load: Load, watched: Watched, share: float, length: float, chains: Sequence[Sequence[Timed]]) -> Cell:
    rates = [rate(load.batch, share, runs) for runs in chains]
    load.set(ADAPTIVE)
    first, learnt = len(watched.steps), 0.0
    while learnt < LEARNS_S:
        begun = time.perf_counter()
        load.run()
        learnt += time.perf_counter() - begun
    own: list[Timed] = []
    while sum(run.seconds for run in own) < TIMED_S:
        own.append(load.run())
    last = len(watched.steps)
    load.set(static(rates.index(max(rates))))
    again = load.run()
    steps = [step for run in own for step in run.steps]
    found, seconds = rate(load.batch, share, own), sum(run.seconds for run in own)
    return Cell(
        batch=load.batch,
        length=length,
        rates=rates,
        adaptive=found,
        adaptive_with_luck=sum(run.emitted for run in own) / seconds,
        best_again=rate(load.batch, share, [again]),
        promised=sum(step.promised for step in steps) / len(steps) / found,
        ran={k: sum(step.ran == k for step in steps) / len(steps) for k in range(DEEPEST + 1)},
        steps=watched.steps[first:last],
    )


def show(parts: Parts, acceptance: Acceptance, batches: Sequence[int], overlap: bool, record: Path | None) -> None:
    columns = " ".join(f"{f'K={k}':>7}" for k in range(1, DEEPEST + 1))
    print(f"a step of 3  at once   plain {columns} adaptive  ÷ best  luck  promised  its steps", flush=True)
    cells = []
    for cell in measure(parts, acceptance, batches, overlap):
        cells.append(cell)
        rates = " ".join(f"{found:7.0f}" for found in cell.rates)
        ran = " ".join(f"{k}: {share:.0%}" for k, share in cell.ran.items() if share >= 0.01)
        luck = cell.adaptive_with_luck / cell.adaptive
        found = f"{cell.adaptive:8.0f} {cell.of_best:7.3f} {luck:5.2f} {cell.promised:9.3f}  {ran}"
        print(f"{cell.length:11.1f} {cell.batch:8} {rates} {found}", flush=True)
        if record is not None:
            profile = parts.worker.speculation_report().profile
            kept = {"profile": profile and profile.model_dump(), "cells": [asdict(cell) for cell in cells]}
            record.write_text(json.dumps(kept))
