"""Pure: the engines' reports and the load → the Envelope that all engines of a model should hold.

An envelope is judged by what running at its bounds gives at the load to expect, so that it is safe whatever an engine's
own controller does within it. Unknown load, profile or acceptance never changes one. Holds no clock: time is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pilotfish_engine.contract import reason
from pilotfish_engine.contract.goodput import (
    Acceptance,
    Choice,
    Costs,
    best,
    capacity,
    disable_threshold,
    plain_rate,
    spec_rate,
)
from pilotfish_engine.contract.methods import NO_METHOD
from pilotfish_engine.contract.speculation import LEARNED_VERSION, CostProfile, EngineReport, Envelope, Settings
from pilotfish_engine.contract.times import MeasuredCosts

MARGIN = 0.05  # a new envelope must promise this much more than the present one
UNSAFE = 0.25  # a threshold this far from the computed one is replaced
COOL_DOWN = 15.0  # seconds between changes, of which each but the first must promise URGENT,
URGENT = 0.2
CALM = 60.0  # or come so many seconds after the one before,
RETURN = 300.0  # and so many where it would go back to what was left then
# Speculative steps of a request, before what they accepted is a measurement. Not more: an engine for which drafts do
# not pay spends 1% of its time on them, and a slow one would keep a wrong envelope for minutes.
ENOUGH_STEPS = 32
HOPE = Acceptance.from_length(2.0)  # a threshold must not shut out a draft as good as this: above it nothing is learnt
NARROWEST = Settings(num_steps=1, topk=1, num_draft_tokens=2)
UTILISATION = 0.7  # of a replica's places, without an SLO to compute from


@dataclass(frozen=True)
class Traffic:
    """What one replica carries and costs, from all reports of a model.

    batch: running requests to expect; context: KV rows of one of them. acceptance: over `steps` speculative steps of
    one request each; None before the first.
    """

    batch: int
    context: float
    max_batch: int
    profile: CostProfile | Costs | None
    acceptance: Acceptance | None
    accept_length: float | None
    steps: int


@dataclass(frozen=True)
class State:
    """The envelope in force and when it was last changed; None before the first. left: the one before it."""

    envelope: Envelope | None = None
    changed_at: float | None = None
    left: Envelope | None = None


@dataclass(frozen=True)
class Tuning:
    """`crossover`: running requests from which plain is faster, None when speculation pays at any or it is not known.

    choice: what an engine with this envelope runs at the expected load, with the two best rejected options.
    reason, changed: why this is chosen, and why the envelope is another one than before; None when it is not.
    """

    envelope: Envelope
    known: bool
    crossover: int | None
    choice: Choice | None
    reason: str
    changed: str | None


def traffic(reports: Sequence[EngineReport], concurrency: float | None) -> Traffic | None:
    """Of the replicas that answered; `concurrency` of all of them when it is known, else what they run and hold now."""
    if not reports:
        return None
    running = sum(report.running for report in reports)
    each = (sum(r.running + r.waiting for r in reports) if concurrency is None else concurrency) / len(reports)
    most = min(report.max_running_requests for report in reports)
    context = sum(report.context_tokens for report in reports) / running if running else 0.0
    profile = _costs(reports)
    weights = [
        (report, report.counters.steps) for report in reports if report.accept_length is not None and report.accept
    ]
    steps = sum(weight for _, weight in weights)
    acceptance = accept_length = None
    if steps:
        depth = max(len(report.accept) for report, _ in weights)
        curves = [(Acceptance(report.accept), weight) for report, weight in weights]
        acceptance = Acceptance(
            tuple(sum(curve.at_least(d) * w for curve, w in curves) / steps for d in range(1, depth + 1))
        )
        accept_length = sum((report.accept_length or 0.0) * weight for report, weight in weights) / steps
    batch = max(1, min(most, math.ceil(each - 0.25)))
    return Traffic(batch, context, most, profile, acceptance, accept_length, steps)


def _costs(reports: Sequence[EngineReport]) -> CostProfile | Costs | None:
    """What steps take by the engine that has measured most of them, else by the first start-up profile.

    So the operator computes with what an engine decides by, and comes to what the engine came to.
    """
    learned = max((r.learned for r in reports if r.learned), key=lambda one: one.steps, default=None)
    if learned is not None and learned.steps and learned.version == LEARNED_VERSION and learned.profile.verify_ms:
        return MeasuredCosts(learned.profile, learned.places)
    return next((_plausible(r.profile) for r in reports if r.profile and r.profile.verify_ms), None)


def _plausible(profile: CostProfile) -> CostProfile:
    """A speculative step contains all that a plain one does: what says otherwise is noise of the measurement."""
    return profile.model_copy(update={"overhead_ms": max(profile.overhead_ms, profile.plain_overhead_ms)})


def target_concurrency(asked: int | str, slo: float | None, bounds: Envelope, seen: Traffic | None) -> float | None:
    """Requests that one replica should carry, None while nothing says it.

    Auto: the most at which each user gets `slo` tokens/s under the settings that would run there; without an SLO
    UTILISATION of the places. At least 1.
    """
    if isinstance(asked, int):
        return float(asked)
    if seen is None:
        return None
    if slo is None:
        return max(1.0, math.floor(UTILISATION * seen.max_batch))
    if seen.profile is None:
        return None
    acceptance = seen.acceptance or Acceptance(())
    return float(max(1, capacity(seen.profile, acceptance, seen.context, bounds, slo, seen.max_batch)))


def tune(
    bounds: Envelope, seen: Traffic | None, held: Sequence[Envelope], state: State, now: float
) -> tuple[Tuning, State]:
    """`bounds`: what the spec allows; `held`: what the engines hold, which stands for the envelope after a restart."""
    current = state.envelope or _most_held(held) or bounds
    forced = _within(current, bounds)
    if seen is None or seen.profile is None or seen.acceptance is None or bounds.tuning == "Fixed":
        choice = _choice(seen, forced)
        missing = (
            "no engine has answered yet"
            if seen is None
            else ("no cost profile is known yet" if seen.profile is None else "no speculative step is measured yet")
        )
        if bounds.tuning == "Fixed":
            missing = "tuning is Fixed"
        why = choice.reason if choice and bounds.tuning == "Fixed" else reason.bounds_kept(forced, missing)
        started = state.envelope is not None or bool(held)
        at = now if forced != current else state.changed_at
        known = State(forced, at, state.left) if started else state
        return Tuning(forced, choice is not None, None, choice, why, None), known
    profile, acceptance = seen.profile, seen.acceptance
    free = bounds.model_copy(update={"disable_threshold": "Auto"})
    crossover = disable_threshold(profile, acceptance, seen.context, free, seen.max_batch)
    envelope, change = forced, None
    passed = math.inf if state.changed_at is None else abs(now - state.changed_at)  # a clock may have jumped back
    if seen.steps >= ENOUGH_STEPS and passed >= COOL_DOWN:
        wanted = _wanted(profile, acceptance, seen, bounds, free)
        calm = passed >= (RETURN if wanted == state.left else CALM)
        change = _improvement(profile, acceptance, seen, forced, wanted, calm)
        envelope = wanted if change else forced
    choice = best(profile, acceptance, seen.batch, int(seen.context * seen.batch), envelope)
    why = choice.reason
    if seen.steps < ENOUGH_STEPS:
        unsure = f"{ENOUGH_STEPS} speculative steps are needed to judge them, and {seen.steps} are measured"
        why = reason.bounds_kept(envelope, unsure)
    at = now if envelope != current else state.changed_at
    left = current if envelope != current else state.left
    return Tuning(envelope, True, crossover, choice, why, change), State(envelope, at, left)


def _choice(seen: Traffic | None, envelope: Envelope) -> Choice | None:
    if seen is None or seen.profile is None or seen.acceptance is None:
        return None
    return best(seen.profile, seen.acceptance, seen.batch, int(seen.context * seen.batch), envelope)


def _wanted(
    profile: CostProfile | Costs, acceptance: Acceptance, seen: Traffic, bounds: Envelope, free: Envelope
) -> Envelope:
    """The tightest envelope that holds the best settings of the expected load and of half of it.

    Where plain decoding is best, that is the narrowest that still learns. A computed threshold is one above which not
    even a decent draft would pay: a threshold is where engines stop measuring what they accept.
    """
    loads = (seen.batch, math.ceil(seen.batch / 2))
    choices = [best(profile, acceptance, load, int(seen.context * load), free).settings for load in loads]
    speculative = [settings for settings in choices if settings.num_steps > 0] or [NARROWEST]
    steps = max(settings.num_steps for settings in speculative)
    threshold = bounds.disable_threshold
    if threshold == "Auto":
        depth = max(len(acceptance.accept), len(HOPE.accept))
        hopeful = Acceptance(tuple(max(acceptance.at_least(d), HOPE.at_least(d)) for d in range(1, depth + 1)))
        threshold = disable_threshold(profile, hopeful, seen.context, free, seen.max_batch) or "Auto"
    return Envelope(
        num_steps=steps,
        topk=max(settings.topk for settings in speculative),
        num_draft_tokens=max(steps + 1, *(settings.num_draft_tokens for settings in speculative)),
        disable_threshold=threshold,
        tuning="Adaptive",
    )


def _improvement(
    profile: CostProfile | Costs,
    acceptance: Acceptance,
    seen: Traffic,
    current: Envelope,
    wanted: Envelope,
    calm: bool,
) -> str | None:
    """What the wanted envelope has over the current one, None when that is not worth a change. calm: the last change
    is long ago, else this one must be urgent."""
    old, new = (
        seen.max_batch + 1 if envelope.disable_threshold == "Auto" else envelope.disable_threshold
        for envelope in (current, wanted)
    )
    if calm and abs(old - new) > max(1.0, UNSAFE * min(old, new)):
        return reason.threshold_changed(current, wanted, seen.batch)
    context = int(seen.context * seen.batch)
    rates = []
    for envelope in (current, wanted):
        threshold = envelope.disable_threshold
        if threshold != "Auto" and seen.batch >= threshold:
            rates.append(plain_rate(profile, seen.batch, context))
        else:
            rates.append(spec_rate(profile, acceptance, seen.batch, context, _at_bounds(envelope)))
    if rates[1] > rates[0] * (1 + (MARGIN if calm else URGENT)):
        return reason.bounds_changed(current, wanted, seen.batch, *rates)
    return None


def _at_bounds(envelope: Envelope) -> Settings:
    nodes = envelope.num_draft_tokens if envelope.topk > 1 else envelope.num_steps + 1
    return Settings(num_steps=envelope.num_steps, topk=envelope.topk, num_draft_tokens=max(1, nodes))


def _within(envelope: Envelope, bounds: Envelope) -> Envelope:
    """The envelope as near to itself as the spec allows."""
    if bounds.tuning == "Fixed":
        return bounds
    threshold = envelope.disable_threshold if bounds.disable_threshold == "Auto" else bounds.disable_threshold
    return Envelope(
        num_steps=min(envelope.num_steps, bounds.num_steps),
        topk=min(envelope.topk, bounds.topk),
        num_draft_tokens=min(envelope.num_draft_tokens, bounds.num_draft_tokens),
        disable_threshold=threshold,
        tuning="Adaptive",
    )


def _most_held(held: Sequence[Envelope]) -> Envelope | None:
    return max(held, key=lambda envelope: (held.count(envelope), envelope.model_dump_json()), default=None)


def in_step(reports: Mapping[str, EngineReport], envelope: Envelope) -> tuple[str, ...]:
    """The pods that hold the envelope; those that run no speculation need none."""
    return tuple(pod for pod, report in reports.items() if report.method == NO_METHOD or report.envelope == envelope)
