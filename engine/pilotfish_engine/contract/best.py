"""Says which settings are best at a load, from measured steps.

Has no clock (a step's time is passed in). When to try something else is `probes`' matter, when to wait for what has to
be prepared `preparation`'s, and when to ask at all the controller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pilotfish_engine.contract.acceptance import AcceptanceEstimate
from pilotfish_engine.contract.findings import Findings
from pilotfish_engine.contract.goodput import Choice, best, disable_threshold, expected_yield
from pilotfish_engine.contract.preparation import Preparing
from pilotfish_engine.contract.probes import Prospect
from pilotfish_engine.contract.speculation import (
    LEARNED_VERSION,
    CostProfile,
    Envelope,
    Finding,
    Learned,
    Settings,
)
from pilotfish_engine.contract.times import MeasuredCosts


class Best:
    """One per engine. profile: of costs, in ms. max_batch: the most requests that run at once. key: of model, draft,
    device and ranks; what engines of the same one learnt can be taken over."""

    def __init__(self, profile: CostProfile, max_batch: int, key: str = "") -> None:
        self._profile, self._max_batch, self._key = profile, max_batch, key
        self._estimate = AcceptanceEstimate()
        self._costs = MeasuredCosts(profile)
        self._findings = Findings()

    @property
    def accept_length(self) -> float | None:
        """Recent mean of tokens that a speculative step commits, bonus included; None before the first such step."""
        return self._estimate.accept_length

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the steps that ran lately gave, beside what was promised of them; the last to run first."""
        return self._findings.latest()

    @property
    def learned(self) -> Learned:
        """What is known of the times, for engines of the same kind."""
        return Learned(key=self._key, profile=self._profile, places=self._costs.places())

    def accept(self, depth: int) -> tuple[float, ...]:
        """accept[d-1]: P(at least d drafts of a step accepted), d = 1 … depth; empty before any step."""
        return () if self.accept_length is None else self._estimate.acceptance.accept[:depth]

    def learn(self, learned: Learned) -> str | None:
        """Takes over what another engine knows of the times. Returns why not, where it does not."""
        if learned.version != LEARNED_VERSION:
            return f"it is of version {learned.version}, and {LEARNED_VERSION} is read here"
        if learned.key != self._key:
            return f"it is of {learned.key!r}, and this is {self._key!r}"
        if learned.steps <= self.learned.steps:
            return f"it knows {learned.steps} steps, and {self.learned.steps} are known here"
        try:
            found = MeasuredCosts(learned.profile, learned.places)
        except ValueError as problem:
            return str(problem)
        self._profile, self._costs = learned.profile, found
        return None

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
        if step_ms is not None:
            whole, each = step_ms + (host_ms or 0.0), 1 + expected_yield(self._estimate.acceptance, settings)
            promised = whole * batch * each / self._costs.step_ms(settings, batch, context_tokens)
            self._findings.observe(settings, batch, sum(accept_lens), whole, promised)
            self._costs.observe(settings, batch, context_tokens, step_ms)
        if host_ms is not None:  # a pause longer than a step says little
            self._costs.observe_host(batch, min(host_ms, self._costs.step_ms(settings, batch, context_tokens)))

    def choice(self, batch: int, context_tokens: int, envelope: Envelope) -> Choice:
        """Returns the best settings for `batch` requests, with what they promise. Together these read
        `context_tokens` KV rows."""
        return best(self._costs, self._estimate.acceptance, batch, context_tokens, envelope)

    def step_ms(self, settings: Settings, batch: int, context_tokens: int) -> float:
        """Returns what a step takes, the host's part included."""
        return self._costs.step_ms(settings, batch, context_tokens)

    def rate(self, settings: Settings, batch: int, context_tokens: int) -> float:
        """Returns the tokens/ms of one request."""
        committed = 1 + expected_yield(self._estimate.acceptance, settings)
        return committed / self._costs.step_ms(settings, batch, context_tokens)

    def prospects(
        self, options: Iterable[Settings], batch: int, context_tokens: int, preparing: Preparing
    ) -> list[Prospect]:
        """Returns what each of the options would give, as estimated and as hoped for."""
        hope = self._estimate.hope
        return [
            Prospect(
                settings,
                step_ms=self._costs.step_ms(settings, batch, context_tokens),
                rate=self.rate(settings, batch, context_tokens),
                hoped_rate=(1 + expected_yield(hope, settings)) / self._costs.least_ms(settings, batch, context_tokens),
                preparing_ms=preparing(settings),
            )
            for settings in options
        ]

    def threshold(self, context_per_request: float, envelope: Envelope) -> int | None:
        """Returns the requests at once from which plain decoding is better; None: drafts pay at every load."""
        return disable_threshold(self._costs, self._estimate.acceptance, context_per_request, envelope, self._max_batch)
