"""Chooses what each decode step runs with, within the envelope, from measured costs and acceptance.

Three objects answer three questions: `best`, what is best at a load; `probes`, when to try something else;
`preparation`, when to wait with what has to be recorded first. Here they are asked, each at its time. Has no tensors
and no clock (a step's time is passed in) and knows no method.

A decision holds for DECIDE_EVERY steps, more where they are short, or until the batch has changed by MOVED, and gives
way only to one that is better by HYSTERESIS.
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish_engine.contract import reason
from pilotfish_engine.contract.best import Best
from pilotfish_engine.contract.goodput import Choice, candidates, is_disabled
from pilotfish_engine.contract.preparation import Preparation, Preparing, ready
from pilotfish_engine.contract.probes import Probes
from pilotfish_engine.contract.speculation import (
    PLAIN,
    CostProfile,
    Effective,
    Envelope,
    Finding,
    Learned,
    Settings,
)

DECIDE_EVERY = 8
DECIDE_MS = 25.0  # a decision takes some tenths of a millisecond: so it is made every that often at most,
DECIDE_EVERY_MOST = 32  # but within these steps
MOVED = 0.1
HYSTERESIS = 0.01


class Controller:
    """One per engine. Call `choose` before and `observe` after each decode step; with overlap `observe` may come late.

    profile: the engine's own, in ms. max_batch, key: as of a `Best`.
    """

    def __init__(self, envelope: Envelope, profile: CostProfile, max_batch: int, key: str = "") -> None:
        self._envelope = envelope
        self._best = Best(profile, max_batch, key)
        self._probes = Probes()
        self._preparation = Preparation(HYSTERESIS)
        self._settings = PLAIN
        self._choice: Choice | None = None
        self._decided_batch = 0
        self._steps_since = 0
        self._is_due = False  # a decision, before its time
        self._context_per_request = 0.0
        self._running_ms = 0.0  # of a step of _settings, as of the last decision

    @property
    def envelope(self) -> Envelope:
        return self._envelope

    @property
    def accept_length(self) -> float | None:
        """Recent mean of tokens that a speculative step commits, bonus included; None before the first such step."""
        return self._best.accept_length

    @property
    def accept(self) -> tuple[float, ...]:
        """accept[d-1]: P(at least d drafts of a step accepted), to the envelope's depth; empty before any step."""
        return self._best.accept(self._envelope.num_steps)

    @property
    def choice(self) -> Choice | None:
        """The last decision with what it promises; None before the first."""
        return self._choice

    @property
    def reason(self) -> str:
        """Why it runs what it runs, in one of the forms for people."""
        choice = self._choice
        if choice is None:
            return "No step has run yet."
        if choice.settings == self._settings:
            return choice.reason
        batch = choice.running
        rate = 1000 * batch * self._best.rate(self._settings, batch, int(self._context_per_request * batch))
        best_one = (choice.settings, choice.tokens_per_second)
        plain = choice.plain_tokens_per_second
        return reason.kept((self._settings, rate), batch, plain, best_one, self._envelope)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the steps that ran lately gave, beside what was promised of them; the last to run first."""
        return self._best.findings

    @property
    def learned(self) -> Learned:
        """What it knows of its times, for engines of the same kind."""
        return self._best.learned

    def learn(self, learned: Learned) -> str | None:
        """Takes over what another engine knows of the times. Returns why not, where it does not."""
        refused = self._best.learn(learned)
        self._is_due |= refused is None
        return refused

    def effective(self) -> Effective:
        """What runs now between probes; disable_threshold is the envelope's number, or computed from what is known."""
        given = self._envelope.disable_threshold
        threshold = self._best.threshold(self._context_per_request, self._envelope) if given == "Auto" else given
        return Effective(
            num_steps=self._settings.num_steps,
            topk=self._settings.topk,
            num_draft_tokens=self._settings.num_draft_tokens,
            disable_threshold=threshold,
            active=self._settings.num_steps > 0 and self._best.accept_length is not None,
        )

    def set_envelope(self, envelope: Envelope) -> None:
        """Holds from the next `choose` on. What was learnt stays."""
        self._envelope = envelope
        self._probes.forget()
        self._choice = None

    def choose(self, batch: int, context_tokens: int, preparing: Preparing = ready) -> Settings:
        """Settings of the next step of `batch` ≥ 1 requests that read `context_tokens` KV rows together."""
        self._context_per_request = context_tokens / batch
        if self._is_over(batch) or preparing(self._settings) > 0:
            self._decide(batch, context_tokens, preparing)
        # the first speculative steps need not be earned, as nothing is known
        return self._probes.next(unearned=self._best.accept_length is None) or self._settings

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
        self._best.observe(settings, context_tokens, accept_lens, step_ms, host_ms)
        self._steps_since += 1
        if settings is self._settings or settings == self._settings:
            self._probes.earn(self._running_ms)
            return
        own = self._best.step_ms(settings, batch, context_tokens)
        running = 1 / self._best.rate(self._settings, batch, context_tokens)
        self._is_due |= self._probes.spent(own - running * sum(accept_lens) / batch)

    def _is_over(self, batch: int) -> bool:
        """Whether the last decision has held long enough, or was about another load."""
        if self._choice is None or abs(batch - self._decided_batch) > MOVED * self._decided_batch:
            return True
        before = self._decided_batch
        disabled = is_disabled(self._envelope, batch) != is_disabled(self._envelope, before)
        if disabled or self._is_told(batch) != self._is_told(before):
            return True
        held = self._steps_since >= DECIDE_EVERY and self._steps_since * self._running_ms >= DECIDE_MS
        return held or self._steps_since >= DECIDE_EVERY_MOST or self._is_due

    def _decide(self, batch: int, context_tokens: int, preparing: Preparing) -> None:
        before, wanted = self._settings, self._settle(batch, context_tokens)
        if not self._is_told(batch):
            options, ran_ms = (PLAIN, *candidates(self._envelope)), self._steps_since * self._running_ms
            wanted = self._preparation.settle(
                wanted, before, options, lambda s: self._best.rate(s, batch, context_tokens), preparing, ran_ms
            )
        self._settings = wanted
        self._decided_batch, self._steps_since, self._is_due = batch, 0, False
        self._running_ms = self._best.step_ms(self._settings, batch, context_tokens)
        if self._settings != before or not self._has_choice(batch):
            self._probes.forget()
        # what was paid for is run first
        unknown = self._best.accept_length is None
        if (
            (unknown or self._probes.wants_plan(self._running_ms))
            and self._has_choice(batch)
            and preparing(self._settings) == 0
        ):
            self._plan_probe(batch, context_tokens, preparing)

    def _plan_probe(self, batch: int, context_tokens: int, preparing: Preparing) -> None:
        others = (settings for settings in (PLAIN, *candidates(self._envelope)) if settings != self._settings)
        prospects = self._best.prospects(others, batch, context_tokens, preparing)
        rate = self._best.rate(self._settings, batch, context_tokens)
        self._probes.plan(prospects, batch, rate, bar=rate * (1 + HYSTERESIS))

    def _settle(self, batch: int, context_tokens: int) -> Settings:
        """The best settings, or those that run while the best are not better by HYSTERESIS."""
        first = self._choice is None
        choice = self._choice = self._best.choice(batch, context_tokens, self._envelope)
        if first or choice.settings == self._settings or not self._has_choice(batch):
            return choice.settings
        current = 1000 * batch * self._best.rate(self._settings, batch, context_tokens)
        return choice.settings if choice.tokens_per_second >= current * (1 + HYSTERESIS) else self._settings

    def _is_told(self, batch: int) -> bool:
        """Whether the envelope alone says what runs."""
        fixed = self._envelope.tuning == "Fixed" and self._envelope.disable_threshold != "Auto"
        return fixed or is_disabled(self._envelope, batch)

    def _has_choice(self, batch: int) -> bool:
        """Whether the envelope leaves a choice here, and the settings that run are within it."""
        return not self._is_told(batch) and (self._settings == PLAIN or self._settings in candidates(self._envelope))
