"""Chooses before every decode step what it runs with, within the envelope, from measured costs and measured acceptance.

The formulas are `contract.goodput`; what is learnt of the drafts is `acceptance`, and of time `times`; here are the
decisions. Has no tensors and no clock (a step's time is passed in) and knows no method.

A decision holds for DECIDE_EVERY steps, more where they are short, or until the batch has changed by MOVED, and gives
way only to one that is better by HYSTERESIS. What is not run is not measured, so a small part of the time, PROBE_SHARE,
goes to probes: what is being run earns credit, and a probe spends it as it loses against what it interrupts; while a
probe wins, it goes on.

Settings whose steps have to be prepared first (recorded as a graph) wait until running the best of those that are ready
has cost as much as preparing them will. Where none is ready the best is prepared at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pilotfish_engine.contract.goodput import (
    MARGIN,
    Choice,
    best,
    candidates,
    describe,
    disable_threshold,
    expected_yield,
    spec_rate,
    spec_step_ms,
)
from pilotfish_engine.contract.speculation import PLAIN, CostProfile, Effective, Envelope, Settings
from pilotfish_engine.speculation.acceptance import AcceptanceEstimate
from pilotfish_engine.speculation.times import HostTimes, StepTimes

DECIDE_EVERY = 8
DECIDE_MS = 25.0  # a decision takes some tenths of a millisecond: so it is made every that often at most,
DECIDE_EVERY_MOST = 32  # but within these steps
MOVED = 0.1
HYSTERESIS = 0.01
PROBE_SHARE = 0.01
PROBE_REQUEST_STEPS = 4  # a probe starts when the credit pays for so many if none of them accepts anything
MAX_PROBE_STEPS = 32

Preparing = Callable[[Settings], float]  # ms that steps of these settings take once, beside their own time; 0: ready


def _ready(settings: Settings) -> float:
    return 0.0


class Controller:
    """One per engine. Call `choose` before and `observe` after each decode step; with overlap `observe` may come late.

    profile: the engine's own, in ms. max_batch: the most requests that run at once.
    """

    def __init__(self, envelope: Envelope, profile: CostProfile, max_batch: int) -> None:
        self._envelope = envelope
        self._profile = profile
        self._max_batch = max_batch
        self._estimate = AcceptanceEstimate()
        self._times = StepTimes()
        self._host = HostTimes(profile)
        self._settings = PLAIN
        self._choice: Choice | None = None
        self._decided_batch = 0
        self._steps_since = 0
        self._is_due = False  # a decision, before its time
        self._context_per_request = 0.0
        self._running_ms = 0.0  # of a step of _settings, as of the last decision
        self._next_probe: Settings | None = None
        self._probe_price_ms = self._probe_preparing_ms = 0.0
        self._probe: Settings | None = None
        self._probe_steps = 0
        self._probes_begun = 0
        self._credit_ms = 0.0
        self._missed_ms = 0.0  # by waiting with what was not ready, since something was prepared

    @property
    def envelope(self) -> Envelope:
        return self._envelope

    @property
    def accept_length(self) -> float | None:
        """Recent mean of tokens that a speculative step commits, bonus included; None before the first such step."""
        return self._estimate.accept_length

    @property
    def accept(self) -> tuple[float, ...]:
        """accept[d-1]: P(at least d drafts of a step accepted), to the envelope's depth; empty before any step."""
        if self._estimate.accept_length is None:
            return ()
        return self._estimate.acceptance.accept[: self._envelope.num_steps]

    @property
    def reason(self) -> str:
        """Why it runs what it runs, in numbers."""
        if self._choice is None:
            return "no step has run yet"
        if self._choice.settings == self._settings:
            return self._choice.reason
        why = f"nothing that is ready is better by {HYSTERESIS:.0%}"
        return f"runs {describe(self._settings)}, as {why}: {self._choice.reason}"

    def effective(self) -> Effective:
        """What runs now between probes; disable_threshold is the envelope's number, or computed from what is known."""
        threshold = self._envelope.disable_threshold
        return Effective(
            num_steps=self._settings.num_steps,
            topk=self._settings.topk,
            num_draft_tokens=self._settings.num_draft_tokens,
            disable_threshold=self._auto_threshold() if threshold == "Auto" else threshold,
            active=self._settings.num_steps > 0 and self._estimate.accept_length is not None,
        )

    def set_envelope(self, envelope: Envelope) -> None:
        """Holds from the next `choose` on. What was learnt stays."""
        self._envelope = envelope
        self._probe, self._next_probe, self._choice = None, None, None

    def choose(self, batch: int, context_tokens: int, preparing: Preparing = _ready) -> Settings:
        """Settings of the next step of `batch` ≥ 1 requests that read `context_tokens` KV rows together."""
        self._context_per_request = context_tokens / batch
        if self._is_over(batch) or preparing(self._settings) > 0:
            self._decide(batch, context_tokens, preparing)
        earned = self._credit_ms >= self._probe_price_ms + self._probe_preparing_ms
        if self._probe is None and self._next_probe and (earned or self._on_credit()):
            self._probe, self._next_probe, self._credit_ms = self._next_probe, None, self._probe_price_ms
            self._probe_steps = 0
            self._probes_begun += 1
        return self._probe or self._settings

    def observe(
        self,
        settings: Settings,
        context_tokens: int,
        accept_lens: Sequence[int],
        step_ms: float | None = None,
        host_ms: float | None = None,
    ) -> None:
        """A step of `settings` committed accept_lens[i] ≥ 1 tokens of each request. host_ms: between it and the decode
        step right before it. None: it was not timed."""
        batch = len(accept_lens)
        self._estimate.observe(settings, accept_lens)
        predicted_ms = spec_step_ms(self._profile, batch, context_tokens, settings)
        if step_ms is not None:
            self._times.observe(settings, batch, step_ms / predicted_ms)
        if host_ms is not None:
            self._host.observe(batch, min(host_ms, predicted_ms))  # a longer pause says little
        self._steps_since += 1
        if settings is self._settings or settings == self._settings:
            self._credit_ms += PROBE_SHARE * self._running_ms
        else:
            self._credit_ms -= self._loss_ms(settings, batch, context_tokens, sum(accept_lens) / batch)
            self._probe_steps += 1
            if self._credit_ms < 0 or self._probe_steps >= MAX_PROBE_STEPS:
                self._probe, self._is_due = None, True

    def _is_over(self, batch: int) -> bool:
        """Whether the last decision has held long enough, or was about another load."""
        if self._choice is None or abs(batch - self._decided_batch) > MOVED * self._decided_batch:
            return True
        if self._is_told(batch) != self._is_told(self._decided_batch):
            return True
        held = self._steps_since >= DECIDE_EVERY and self._steps_since * self._running_ms >= DECIDE_MS
        return held or self._steps_since >= DECIDE_EVERY_MOST or self._is_due

    def _on_credit(self) -> bool:
        """Whether the next probe may start unearned: the first speculative steps may, as nothing is known."""
        return self._estimate.accept_length is None and self._next_probe is not None and self._next_probe.num_steps > 0

    def _decide(self, batch: int, context_tokens: int, preparing: Preparing) -> None:
        before = self._settings
        self._settings = self._prepared(self._settle(batch, context_tokens), batch, context_tokens, preparing)
        self._decided_batch, self._steps_since, self._is_due = batch, 0, False
        self._running_ms = self._step_ms(self._settings, batch, context_tokens)
        if self._settings != before or not self._has_choice(batch):
            self._probe = None
        self._next_probe = None
        # what was paid for is run first
        if self._probe is None and self._has_choice(batch) and preparing(self._settings) == 0:
            self._price_probe(batch, context_tokens, preparing)

    def _settle(self, batch: int, context_tokens: int) -> Settings:
        """The best settings, or those that run while the best are not better by HYSTERESIS."""
        first, acceptance = self._choice is None, self._estimate.acceptance
        cost_ratio = self._times.spec_to_plain(batch)
        margin = (1 + MARGIN) * cost_ratio - 1
        profile = self._host.profile(batch)
        choice = self._choice = best(profile, acceptance, batch, context_tokens, self._envelope, margin)
        if first or choice.settings == self._settings or not self._has_choice(batch):
            return choice.settings
        current = spec_rate(profile, acceptance, batch, context_tokens, self._settings)
        better = choice.tokens_per_second / current
        if self._settings.num_steps > 0 and choice.settings == PLAIN:
            better *= cost_ratio
        elif self._settings == PLAIN:
            better /= cost_ratio
        return choice.settings if better >= 1 + HYSTERESIS else self._settings

    def _prepared(self, wanted: Settings, batch: int, context_tokens: int, preparing: Preparing) -> Settings:
        """`wanted`, or while it is not ready the best that is, until waiting has cost what preparing will."""
        price = preparing(wanted)
        if price == 0 or self._is_told(batch):
            return wanted
        ready = [s for s in (PLAIN, *candidates(self._envelope)) if preparing(s) == 0]
        if not ready:
            return wanted
        rates = {s: self._rate(s, batch, context_tokens) for s in (wanted, *ready)}
        instead = max(ready, key=lambda s: rates[s])
        if self._settings in ready and rates[instead] < rates[self._settings] * (1 + HYSTERESIS):
            instead = self._settings
        self._missed_ms += self._steps_since * self._running_ms * max(0.0, 1 - rates[instead] / rates[wanted])
        if self._missed_ms < price:
            return instead
        self._missed_ms = 0.0
        return wanted

    def _is_told(self, batch: int) -> bool:
        """Whether the envelope alone says what runs."""
        threshold = self._envelope.disable_threshold
        return threshold != "Auto" and (batch >= threshold or self._envelope.tuning == "Fixed")

    def _has_choice(self, batch: int) -> bool:
        """Whether the envelope leaves a choice here, and the settings that run are within it."""
        return not self._is_told(batch) and (self._settings == PLAIN or self._settings in candidates(self._envelope))

    def _price_probe(self, batch: int, context_tokens: int, preparing: Preparing) -> None:
        subjects = self._subjects()
        if not subjects:
            return
        probe = self._next_probe = subjects[self._probes_begun % len(subjects)]
        steps = -(-PROBE_REQUEST_STEPS // batch)
        least = 0.1 * self._step_ms(probe, batch, context_tokens)  # else a free probe would never end
        self._probe_price_ms = steps * max(least, self._loss_ms(probe, batch, context_tokens, committed=1))
        self._probe_preparing_ms = preparing(probe)

    def _subjects(self) -> list[Settings]:
        """What the running settings do not teach: plain's time, deeper chains, trees beside chains and the reverse."""
        allowed = candidates(self._envelope)
        if not allowed:
            return []
        chains = [s for s in allowed if s.topk == 1]
        deepest = max(chains or allowed, key=lambda s: s.num_steps)
        subjects = [deepest]
        if self._settings.num_steps > 0:
            subjects.append(PLAIN)
        elif self._choice is not None and self._choice.rejected:
            subjects.append(self._choice.rejected[0].settings)
        if self._envelope.topk > 1 and self._settings.topk == 1 and chains:
            subjects.append(min((s for s in allowed if s.topk > 1), key=lambda s: s.num_draft_tokens, default=deepest))
        return [s for s in subjects if s != self._settings]

    def _loss_ms(self, settings: Settings, batch: int, context_tokens: int, committed: float) -> float:
        """What a step that commits so many tokens a request takes longer than these take under what is being run."""
        own = self._step_ms(settings, batch, context_tokens)
        running = self._step_ms(self._settings, batch, context_tokens)
        return own - running * committed / (1 + expected_yield(self._estimate.acceptance, self._settings))

    def _rate(self, settings: Settings, batch: int, context_tokens: int) -> float:
        """Tokens/ms of one request."""
        committed = 1 + expected_yield(self._estimate.acceptance, settings)
        return committed / self._step_ms(settings, batch, context_tokens)

    def _step_ms(self, settings: Settings, batch: int, context_tokens: int) -> float:
        """By the profile and what the host adds, speculative steps corrected to plain ones."""
        ratio = self._times.spec_to_plain(batch) if settings.num_steps > 0 else 1.0
        return ratio * spec_step_ms(self._host.profile(batch), batch, context_tokens, settings)

    def _auto_threshold(self) -> int | None:
        return disable_threshold(
            self._profile, self._estimate.acceptance, self._context_per_request, self._envelope, self._max_batch
        )
