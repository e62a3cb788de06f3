"""Who chooses a simulated engine's settings: the engines' own controller, nobody, or somebody who knows the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.goodput import Acceptance, Costs, candidates, expected_yield
from pilotfish_engine.contract.speculation import PLAIN, Envelope, Settings


class Chooser(Protocol):
    """As `contract.Controller` is asked and told."""

    def choose(self, batch: int, context_tokens: int) -> Settings: ...

    def observe(
        self,
        settings: Settings,
        context_tokens: int,
        accept_lens: Sequence[int],
        step_ms: float | None = None,
        host_ms: float | None = None,
    ) -> None: ...


class Static:
    """Always the same settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def choose(self, batch: int, context_tokens: int) -> Settings:
        return self._settings

    def observe(
        self,
        settings: Settings,
        context_tokens: int,
        accept_lens: Sequence[int],
        step_ms: float | None = None,
        host_ms: float | None = None,
    ) -> None:
        pass


class Oracle(Static):
    """The best settings within the envelope, by what steps really take and drafts really are worth. `acceptance` is
    told by the engine before each choice."""

    def __init__(self, costs: Costs, envelope: Envelope, host_ms: float) -> None:
        super().__init__(PLAIN)
        self._costs, self._options, self._host_ms = costs, (PLAIN, *candidates(envelope)), host_ms
        self.acceptance = Acceptance(())

    def choose(self, batch: int, context_tokens: int) -> Settings:
        return max(
            self._options,
            key=lambda s: (
                (1 + expected_yield(self.acceptance, s))
                / (self._costs.step_ms(s, batch, context_tokens) + self._host_ms)
            ),
        )


__all__ = ["Chooser", "Controller", "Oracle", "Static"]
