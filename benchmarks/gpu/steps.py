"""The engine's own step loop at a given load: its time a step, and how much of it the device works."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from pilotfish_engine.contract.speculation import EnvelopeUpdate
from pilotfish_engine.engine import Parts
from pilotfish_engine.messages import Grammar, SamplingParams, Submit
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.types import CompiledGrammar

PROMPT = 512
WARM = 24  # steps before the clock starts
STEPS = 120
LONGEST = 1500  # tokens of an answer, never reached
REPLAYS = 20


@dataclass(frozen=True)
class Cell:
    """step_ms: of the loop. device_ms: of the same step's graph, replayed alone; None where it was none."""

    tokens_per_second: float
    step_ms: float
    tokens_a_step: float
    device_ms: float | None
    prefill_s: float

    @property
    def waits(self) -> float | None:
        """The share of a step that the device stands still."""
        return None if self.device_ms is None else max(0.0, 1 - self.device_ms / self.step_ms)


@dataclass(frozen=True)
class Load:
    """`batch` requests at once, timed for so many steps. seed: of their prompts. grammar: that all answers follow."""

    batch: int
    seed: int
    steps: int = STEPS
    grammar: Grammar | None = None
    grammars: Callable[[Grammar], Future[CompiledGrammar]] | None = None


def run(parts: Parts, envelope: EnvelopeUpdate, load: Load, overlap: bool) -> Cell:
    scheduler = Scheduler(parts.worker, parts.chunk_size, parts.stop_text, overlap, grammars=load.grammars)
    scheduler.set_envelope(envelope)
    drawn, batch, steps = random.Random(load.seed), load.batch, load.steps
    begun = time.perf_counter()
    for number in range(batch):
        params = SamplingParams(max_tokens=LONGEST, temperature=0.0, ignore_eos=True, grammar=load.grammar)
        prompt = [drawn.randrange(1000, 100000) for _ in range(PROMPT)]
        scheduler.submit(Submit(request_id=str(number), prompt=prompt, params=params))
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in scheduler.step() if output.token_ids}
    prefill_s = time.perf_counter() - begun
    for _ in range(WARM):
        scheduler.step()
    torch.cuda.synchronize()
    begun, before = time.perf_counter(), scheduler.report().counters
    for _ in range(steps):
        scheduler.step()
    torch.cuda.synchronize()
    seconds, after = time.perf_counter() - begun, scheduler.report().counters
    emitted = after.emitted_tokens - before.emitted_tokens
    device_ms = _replayed_ms(parts)
    for number in range(batch):
        scheduler.abort(str(number))
    while scheduler.has_work:
        scheduler.step()
    scheduler.flush_cache()
    return Cell(emitted / seconds, 1e3 * seconds / steps, emitted / steps / batch, device_ms, prefill_s)


def arrivals(parts: Parts, batch: int, overlap: bool, prompt: int, every: int, steps: int = 400) -> tuple[float, ...]:
    """Milliseconds between the tokens of `batch` requests while prompts come. Each has so many tokens, and one comes
    every so many steps: p50, p90, p99. The newcomers say one token."""
    scheduler = Scheduler(parts.worker, parts.chunk_size, parts.stop_text, overlap)
    scheduler.set_envelope(EnvelopeUpdate(num_steps=0, tuning="Fixed"))
    drawn = random.Random(every)

    def submit(name: str, length: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        ids = [drawn.randrange(1000, 100000) for _ in range(length)]
        scheduler.submit(Submit(request_id=name, prompt=ids, params=params))

    for number in range(batch):
        submit(str(number), PROMPT, LONGEST)
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in scheduler.step() if output.token_ids}
    for _ in range(WARM):
        scheduler.step()
    between, last = [], time.perf_counter()
    for step in range(steps):
        if step % every == 0:
            submit(f"new {step}", prompt, 1)
        if any(output.request_id == "0" for output in scheduler.step()):
            now = time.perf_counter()
            between.append(1e3 * (now - last))
            last = now
    for number in range(batch):
        scheduler.abort(str(number))
    while scheduler.has_work:
        scheduler.step()
    scheduler.flush_cache()
    between.sort()
    return tuple(between[int(share * (len(between) - 1))] for share in (0.5, 0.9, 0.99))


def kernels(parts: Parts) -> list[tuple[str, float, int]]:
    """Name, microseconds and number of the kernels of the last used graph, in one replay."""
    again = _last_graph(parts)
    assert again is not None, "a step has been recorded"
    again()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(REPLAYS):
            again()
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / REPLAYS, e.count // REPLAYS) for e in found.key_averages()]
    return sorted(rows, key=lambda row: -row[1])


def _last_graph(parts: Parts) -> Callable[[], object] | None:
    graphs = parts.worker._graphs
    if graphs is None or not len(graphs.steps):
        return None
    return next(reversed(graphs.steps._graphs.values()))._whole._again


def _replayed_ms(parts: Parts) -> float | None:
    """Of the graph that was used last. Its rows go on by some tokens, in the scratch page where they have no other."""
    again = _last_graph(parts)
    if again is None:
        return None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    again()
    begin.record()
    for _ in range(REPLAYS):
        again()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS
