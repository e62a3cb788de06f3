"""Keys to work on: each at most once at a time, none forgotten, failures retried with back-off and jitter.

Knows nothing about what a key means. Any number of `add`s of a key before its turn are one turn; an `add` during its
turn brings another one after it. Memory grows with the number of distinct keys, never with the number of events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
log = logging.getLogger(__name__)


class Retry(Exception):
    """The key failed for a known reason; `after` seconds until its next turn, None for the ordinary back-off."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class WorkQueue(Generic[Key]):
    """`process(key)` returns the seconds until the key's next turn, or None to forget it until somebody adds it."""

    def __init__(
        self,
        process: Callable[[Key], Awaitable[float | None]],
        *,
        workers: int = 8,
        first_delay: float = 0.5,
        last_delay: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._process, self._workers = process, workers
        self._first_delay, self._last_delay, self._clock, self._jitter = first_delay, last_delay, clock, jitter
        self._due: dict[Key, float] = {}
        self._running: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()

    def add(self, key: Key, after: float = 0.0) -> None:
        """Give `key` a turn in `after` seconds, or earlier if it has an earlier one."""
        due = self._clock() + after
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._wake.set()

    def retry_delay(self, failures: int) -> float:
        """Seconds before the next turn after so many failures in a row: doubling, capped, jittered by half."""
        delay = min(self._last_delay, self._first_delay * 2.0 ** (failures - 1))
        return delay * (0.5 + self._jitter() / 2)

    def stuck(self) -> float:
        """Seconds of the longest turn, or of the longest wait of a due key."""
        now = self._clock()
        waiting = [due for key, due in self._due.items() if key not in self._running]
        return max((now - since for since in [*self._running.values(), *waiting]), default=0.0)

    def depth(self) -> int:
        """Keys that are due or running."""
        now = self._clock()
        return len({key for key, due in self._due.items() if due <= now} | set(self._running))

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                now = self._clock()
                idle = (item for item in self._due.items() if item[0] not in self._running)
                ready = sorted((due, order, key) for order, (key, due) in enumerate(idle))
                for due, _, key in ready:
                    if due <= now and len(self._running) < self._workers:
                        del self._due[key]
                        self._running[key] = now
                        group.create_task(self._turn(key))
                later = [due - now for due, _, key in ready if key in self._due and due > now]
                # no wait_for: Python 3.11's forgets that it was cancelled where the event comes in the same moment
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(later, default=None)):
                        await self._wake.wait()

    async def _turn(self, key: Key) -> None:
        try:
            after = await self._process(key)
            self._failures.pop(key, None)
            if after is not None:
                self.add(key, after)
        except Exception as problem:  # one key's failure is never another's
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            known = isinstance(problem, Retry)
            after = problem.after if isinstance(problem, Retry) else None
            delay = self.retry_delay(failures) if after is None else after * (1 + self._jitter() / 4)
            level, trace = (logging.WARNING, None) if known else (logging.ERROR, problem)
            log.log(
                level,
                "%s failed (%d in a row), again in %.1fs: %s",
                key,
                failures,
                delay,
                problem or type(problem).__name__,
                exc_info=trace,
            )
            self.add(key, delay)
        finally:
            self._running.pop(key, None)
            self._wake.set()
