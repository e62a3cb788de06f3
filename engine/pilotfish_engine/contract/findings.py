"""Keeps what an engine's own steps gave lately, beside what was promised of them: the measured truth that it reports.

Pure counting, without a clock. A finding is of one setting at one size of batch (its power of two). Knows nothing about
what is chosen next.
"""

from __future__ import annotations

from pilotfish_engine.contract.speculation import Finding, Settings

KEPT = 8  # findings, the last ones to run
HALF_LIFE_STEPS = 64


class _Sums:
    """Fading sums over steps."""

    def __init__(self) -> None:
        self.steps = self.requests = self.tokens = self.ms = self.promised_tokens = 0.0


class Findings:
    """One per engine. `observe` after each step that was timed."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Settings, int], _Sums] = {}  # the last to run at the end

    def observe(self, settings: Settings, batch: int, tokens: int, ms: float, promised: float) -> None:
        """A step of `batch` requests committed `tokens` in ms, the host's part included; promised: tokens, in ms."""
        key = (settings, batch.bit_length())
        sums = self._sums.pop(key, None) or _Sums()
        self._sums[key] = sums
        fade = 0.5 ** (1 / HALF_LIFE_STEPS)
        sums.steps = sums.steps * fade + 1
        sums.requests = sums.requests * fade + batch
        sums.tokens = sums.tokens * fade + tokens
        sums.ms = sums.ms * fade + ms
        sums.promised_tokens = sums.promised_tokens * fade + promised
        while len(self._sums) > KEPT:
            del self._sums[next(iter(self._sums))]

    def latest(self) -> tuple[Finding, ...]:
        """Returns the findings, the last to run first."""
        return tuple(
            Finding(
                settings=settings,
                running=sums.requests / sums.steps,
                steps=sums.steps,
                tokens_per_second=1000 * sums.tokens / sums.ms,
                promised_tokens_per_second=1000 * sums.promised_tokens / sums.ms,
            )
            for (settings, _), sums in reversed(self._sums.items())
            if sums.ms > 0
        )
