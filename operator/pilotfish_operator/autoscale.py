"""Pure: what the engines counted → mean concurrency over windows → desired replicas.

As Knative's autoscaler has it: a stable window that replicas follow, and a panic window for bursts, in which nothing
scales in; scale-in takes the most that was wanted during the delay; a step at most doubles or halves. A load that is
not known never scales in; what is known of it is a lower bound and may scale out. Holds no clock: time is passed in.
Knows nothing about Kubernetes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pilotfish_engine.contract import reason
from pilotfish_engine.contract.speculation import EngineReport

PANIC_FACTOR = 2.0  # panic while the panic window's mean is this many times what the ready replicas should carry
TOLERANCE = 0.05  # replicas are added only for a load this share above what the present ones should carry
MAX_RATE = 2.0
COVERED = 0.9  # share of a window that must be measured before its mean may take replicas away


@dataclass(frozen=True)
class Bounds:
    """Replicas and seconds. `target`: requests that one replica should carry; None while that is unknown."""

    min_replicas: int
    max_replicas: int
    target: float | None
    stable: float = 60.0
    delay: float = 300.0

    @property
    def panic(self) -> float:
        return min(self.stable, max(6.0, self.stable / 10))


@dataclass(frozen=True)
class Reading:
    """Load over (since, at]: `concurrency` sums over the replicas that were read; `missing` are the others."""

    since: float
    at: float
    concurrency: float
    missing: frozenset[str] = frozenset()
    tokens_per_second: float = 0.0


@dataclass(frozen=True)
class Counter:
    """An engine's counters as last read."""

    at: float
    concurrency_seconds: float
    emitted_tokens: int


@dataclass(frozen=True)
class Mean:
    """`covered`: share of the window that was measured; `complete`: all of the replicas were, all that time."""

    value: float
    covered: float
    complete: bool


@dataclass(frozen=True)
class State:
    """What a decision needs of the ones before it. `wanted`: (time, replicas) over the delay."""

    readings: tuple[Reading, ...] = ()
    counters: Mapping[str, Counter] = field(default_factory=dict)
    wanted: tuple[tuple[float, int], ...] = ()
    since: float | None = None
    panic_at: float | None = None
    read_at: float | None = None


@dataclass(frozen=True)
class Scale:
    """`limited`: what keeps replicas from where the load wants them, None when nothing does."""

    replicas: int
    stable: Mean
    panic: Mean
    panicking: bool
    known: bool
    limited: str | None
    reason: str


def measure(state: State, serving: Collection[str], reports: Mapping[str, EngineReport], now: float) -> State:
    """Take in the reports just read, by pod; `serving` names every pod that should have answered.

    A pod's mean since it was last read is exact whatever happened between, so it also completes readings that missed
    it. At first sight, and after a restart of its counters, running + waiting of now stand for it.
    """
    counters, readings, total, tokens = dict[str, Counter](), state.readings, 0.0, 0.0
    for pod in serving:
        report, last = reports.get(pod), state.counters.get(pod)
        if report is None:
            if last:
                counters[pod] = last
            continue
        new = Counter(now, report.concurrency_seconds_total, report.counters.emitted_tokens)
        counters[pod] = new
        if last and last.at < now and new.concurrency_seconds >= last.concurrency_seconds:
            load = (new.concurrency_seconds - last.concurrency_seconds) / (now - last.at)
            readings = tuple(_completed(reading, pod, load, last.at) for reading in readings)
            tokens += max(0, new.emitted_tokens - last.emitted_tokens) / (now - last.at)
            total += load
        else:
            total += report.running + report.waiting
    if serving and state.read_at is not None:
        missing = frozenset(pod for pod in serving if pod not in reports)
        readings = (*readings, Reading(state.read_at, now, total, missing, tokens))
    return replace(state, counters=counters, read_at=now, readings=readings)


def _completed(reading: Reading, pod: str, load: float, since: float) -> Reading:
    if pod not in reading.missing or reading.since < since:
        return reading
    return replace(reading, concurrency=reading.concurrency + load, missing=reading.missing - {pod})


def mean(readings: Collection[Reading], window: float, now: float) -> Mean:
    """Time-weighted mean concurrency over the window that ends now."""
    weight = area = 0.0
    complete = True
    for reading in readings:
        overlap = min(reading.at, now) - max(reading.since, now - window)
        if overlap > 0:
            weight, area = weight + overlap, area + overlap * reading.concurrency
            complete = complete and not reading.missing
    return Mean(area / weight if weight else 0.0, min(1.0, weight / window), complete and weight > 0)


def wanted(load: float, target: float, current: int) -> int:
    """Fewest replicas, 1 at least, that carry `load`; `current` while the load is within TOLERANCE of changing them."""
    fewest = max(1, math.ceil(load / (target * (1 + TOLERANCE)) - 1e-9))
    safe = max(1, math.ceil(load / target - 1e-9))
    return fewest if fewest > current else min(current, safe)


def decide(bounds: Bounds, state: State, current: int, ready: int, now: float) -> tuple[Scale, State]:
    """Desired replicas. `current`: as last asked for; `ready`: those that serve."""
    readings = tuple(reading for reading in state.readings if reading.at > now - bounds.stable)
    stable, panic = mean(readings, bounds.stable, now), mean(readings, bounds.panic, now)
    since = now if state.since is None else state.since
    target = bounds.target
    low_known = target is not None and stable.complete and stable.covered >= COVERED
    high_known = target is not None and stable.covered * bounds.stable >= bounds.panic * COVERED
    want, panic_at = current, state.panic_at
    if target is not None and high_known:
        burst = wanted(panic.value, target, ready) if panic.covered >= 0.5 else 1
        if ready and burst > ready and panic.value >= PANIC_FACTOR * ready * target:
            panic_at = now
        want = wanted(stable.value, target, current)
        if panic_at is not None and now - panic_at <= bounds.stable:
            want = max(want, burst, current)
        else:
            panic_at = None
    if not low_known:
        want = max(want, current)
    panicking = panic_at is not None
    history = (*((at, n) for at, n in state.wanted if at > now - bounds.delay), (now, want))
    # what was wanted a while ago keeps replicas that are there, and brings none that are not
    kept = max(n for _, n in history) if now - since >= bounds.delay else current
    floor = max(want, min(current, kept))
    ceiling = max(current, math.ceil(MAX_RATE * max(1, ready)))
    step = min(max(floor, math.floor(current / MAX_RATE), 1), ceiling)
    replicas = min(max(step, bounds.min_replicas), bounds.max_replicas)
    scale = Scale(
        replicas,
        stable,
        panic,
        panicking,
        low_known,
        _limit(bounds, want, current, stable, target),
        _reason(bounds, stable, panic, panicking, low_known, replicas, current),
    )
    return scale, replace(state, readings=readings, wanted=history, since=since, panic_at=panic_at)


def _limit(bounds: Bounds, want: int, current: int, stable: Mean, target: float | None) -> str | None:
    if want > bounds.max_replicas:
        return f"the load wants {reason.count(want)} and maxReplicas is {bounds.max_replicas}"
    if current > bounds.min_replicas and target is None:
        return "nothing scales in while the capacity of a replica is not known"
    if current > bounds.min_replicas and stable.covered and not stable.complete:
        return "nothing scales in while the load is not known for a whole window"
    return None


def _reason(
    bounds: Bounds, stable: Mean, panic: Mean, panicking: bool, known: bool, replicas: int, current: int
) -> str:
    if bounds.target is None:
        return reason.replicas_kept(replicas, "what one carries is not known yet")
    load, seconds = (panic.value, bounds.panic) if panicking else (stable.value, bounds.stable)
    fewest = max(bounds.min_replicas, wanted(load, bounds.target, current))
    if replicas != current or replicas <= fewest:
        return reason.replicas(replicas, load, seconds, bounds.target, panicking)
    if not known:
        measured = f"the load is measured for {stable.covered * bounds.stable:.0f} of {bounds.stable:.0f} s"
        if stable.covered >= COVERED:
            measured = "a pod's load is not known"
        return reason.replicas_kept(replicas, f"{measured}, and nothing scales in on that")
    return reason.replicas_kept(
        replicas, f"{load:.1f} requests at once need {fewest}, and fewer come after {bounds.delay:.0f} s of that"
    )
