"""What an engine has done since its start: steps and tokens of all requests, and how many requests it had over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pilotfish_engine.contract.speculation import Counters, EngineReport
from pilotfish_engine.scheduler.request import Request
from pilotfish_engine.types import Worker


class Tally:
    """Time comes in through `clock` and is used for the concurrency integral only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counted_at = clock()
        self._steps = self._plain_steps = self._drafted = self._accepted = self._emitted = 0
        self.concurrency_seconds = 0.0
        self.retractions = 0

    def time(self, requests: int) -> None:
        """There were so many requests, waiting ones included, since the last call."""
        now = self._clock()
        self.concurrency_seconds += (now - self._counted_at) * requests
        self._counted_at = now

    def step(self, plain: bool, drafted: int) -> None:
        """Of one request."""
        if plain:
            self._plain_steps += 1
        else:
            self._steps += 1
        self._drafted += drafted

    def tokens(self, emitted: int, accepted: int) -> None:
        self._emitted += emitted
        self._accepted += accepted

    def report(self, worker: Worker, running: Sequence[Request], waiting: int) -> EngineReport:
        speculation = worker.speculation_report()
        return EngineReport(
            method=speculation.method,
            effective=speculation.effective,
            envelope=speculation.envelope,
            running=len(running),
            waiting=waiting,
            context_tokens=context_tokens(running),
            max_running_requests=worker.limits.max_running_requests,
            concurrency_seconds_total=self.concurrency_seconds,
            accept_length=speculation.accept_length,
            accept=speculation.accept,
            counters=self.counters,
            profile=speculation.profile,
            reason=speculation.reason,
            device=speculation.device,
            findings=speculation.findings,
            learned=speculation.learned,
        )

    @property
    def counters(self) -> Counters:
        return Counters(
            steps=self._steps,
            plain_steps=self._plain_steps,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            emitted_tokens=self._emitted,
        )


def context_tokens(requests: Sequence[Request]) -> int:
    """KV rows of these together, as far as the host knows."""
    return sum(request.seat.computed_len for request in requests)
