"""Decides when an engine tries settings that are not the best known. It pays from a small share of its time.

Pure: without tensors or clock. What is not run is not measured, so what runs earns credit, and a probe spends it as it
loses against what it interrupts; while a probe wins, it goes on. Only settings that could be better than what runs, if
all that is not known of them were good, are worth a probe; first those that could win most for their price.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish_engine.contract.speculation import Settings

PROBE_SHARE = 0.005
PROBE_REQUEST_STEPS = 4  # a probe starts when the credit pays for so many
MAX_PROBE_STEPS = 32
_OTHERS = 3  # have their turn before the same is tried again: the depths seldom reached are hoped for for ever
_LEAST = 0.1  # of its step's time is a probe's price, or a free one would never end


@dataclass(frozen=True)
class Prospect:
    """Settings that may be tried. Rates are tokens/ms of one request: as estimated, and were all that is not known of
    the settings good. step_ms: of one step; preparing_ms: what has to be spent once before."""

    settings: Settings
    step_ms: float
    rate: float
    hoped_rate: float
    preparing_ms: float = 0.0


class Probes:
    """One per engine. `plan` at a decision, where it `wants_plan`, `next` before and `ran` after each step."""

    def __init__(self) -> None:
        self._planned: Settings | None = None
        self._price_ms = self._preparing_ms = 0.0
        self._running: Settings | None = None
        self._steps = 0
        self._credit_ms = 0.0
        self._last = deque[Settings](maxlen=_OTHERS)

    def forget(self) -> None:
        """Drops what is planned and under way, as what runs has changed."""
        self._planned = self._running = None

    def plan(self, prospects: Sequence[Prospect], batch: int, rate: float, bar: float) -> None:
        """Chooses what to try next. rate: of what runs, in tokens/ms of one request; bar: what would replace it."""
        worth = [(_price(p, batch, rate), p) for p in prospects if p.hoped_rate > bar]
        if worth := [priced for priced in worth if priced[1].settings not in self._last] or worth:
            self._price_ms, best = max(worth, key=lambda priced: (priced[1].hoped_rate / rate - 1) / priced[0])
            self._planned, self._preparing_ms = best.settings, best.preparing_ms
            self._last.append(best.settings)

    def next(self, unearned: bool) -> Settings | None:
        """Returns what to try with the next step. unearned: it may start before it is paid for."""
        earned = self._credit_ms >= self._price_ms + self._preparing_ms
        if self._running is None and self._planned is not None and (earned or unearned):
            self._running, self._planned, self._steps = self._planned, None, 0
            self._credit_ms = self._price_ms
        return self._running

    def wants_plan(self, running_ms: float) -> bool:
        """Whether there is credit for a probe, and none planned or under way. running_ms: of a step of what runs."""
        return self._running is None and self._planned is None and self._credit_ms >= _LEAST * running_ms

    def earn(self, running_ms: float) -> None:
        """Counts a step of what runs."""
        self._credit_ms += PROBE_SHARE * running_ms

    def spent(self, lost_ms: float) -> bool:
        """Counts a step of a probe that lost so much; returns whether the probe is over."""
        self._credit_ms -= lost_ms
        self._steps += 1
        over = self._credit_ms < max(0.0, lost_ms) or self._steps >= MAX_PROBE_STEPS
        if over:  # the next one is earned anew, even after one that won: else it would run for good, unchosen
            self._running, self._credit_ms = None, min(0.0, self._credit_ms)
        return over


def _price(prospect: Prospect, batch: int, rate: float) -> float:
    """What the steps of a probe are expected to lose, in ms."""
    steps = -(-PROBE_REQUEST_STEPS // batch)
    return steps * prospect.step_ms * max(_LEAST, 1 - prospect.rate / rate)
