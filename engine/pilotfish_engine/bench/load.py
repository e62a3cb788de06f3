"""The requests of one level: when each is sent, until enough were, time is up, or somebody wants to stop.

Knows nothing about what is asked or answered.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pilotfish_engine.bench.client import Outcome
from pilotfish_engine.bench.plan import Level

Send = Callable[[int, float | None], Awaitable[Outcome]]
"""Sends request `number`, which is due at a time of time.perf_counter (None: now)."""


@dataclass
class Load:
    """began: by time.perf_counter. seconds: until the last answer. cpu: share of one core that this process used.
    unfinished: requests that were cut off when the run was."""

    began: float
    outcomes: list[Outcome] = field(default_factory=list)
    started: int = 0
    seconds: float = 0.0
    cpu: float = 0.0

    @property
    def unfinished(self) -> int:
        return self.started - len(self.outcomes)


class Run:
    """One level under way. requests, seconds: after which no more are sent; None: without that bound."""

    def __init__(
        self,
        level: Level,
        first: int,
        requests: int | None,
        seconds: float | None,
        seed: int,
        send: Send,
        progress: Callable[[], object],
    ) -> None:
        self._level = level
        self._next = first
        self._end = None if requests is None else first + requests
        self._seconds = seconds
        self._seed = seed
        self._send = send
        self._progress = progress
        self.load = Load(time.perf_counter())

    async def until(self, stopped: asyncio.Event, limit: float) -> Load:
        """Runs it; what is on its way when `stopped` is set, or `limit` seconds have passed, is cut off."""
        load, cpu = self.load, time.process_time()
        load.began = time.perf_counter()
        working = asyncio.create_task(self._slots() if self._level.kind == "concurrency" else self._arrivals())
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait({working, stopping}, timeout=max(0.0, limit), return_when=asyncio.FIRST_COMPLETED)
        load.seconds = time.perf_counter() - load.began
        load.cpu = (time.process_time() - cpu) / load.seconds
        stopping.cancel()
        if working.done():
            working.result()
        else:
            working.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
        return load

    async def _slots(self) -> None:
        """As many at once as the level says: each answer lets the next request go."""

        async def slot() -> None:
            while (number := self._take(time.perf_counter())) is not None:
                await self._one(number, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(int(self._level.value)):
                group.create_task(slot())

    async def _arrivals(self) -> None:
        """A Poisson process: the next request comes whether or not earlier ones were answered."""
        rng = random.Random(f"{self._seed} {self._level.name}")
        due = self.load.began
        async with asyncio.TaskGroup() as group:
            while (number := self._take(due := due + rng.expovariate(self._level.value))) is not None:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._one(number, due))

    def _take(self, due: float) -> int | None:
        late = self._seconds is not None and due - self.load.began > self._seconds
        if late or self._next == self._end:
            return None
        self._next += 1
        return self._next - 1

    async def _one(self, number: int, due: float | None) -> None:
        self.load.started += 1
        self.load.outcomes.append(await self._send(number, due))
        self._progress()
