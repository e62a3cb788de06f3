"""Requests that wait for a row and pages: by priority, and by arrival among equals.

A request that was retracted has kept its place, so it goes before all that came after it.
"""

from __future__ import annotations

import heapq
import secrets
from itertools import count

from pilotfish_engine.messages import Submit
from pilotfish_engine.scheduler.request import Request
from pilotfish_engine.scheduler.stops import StopTextFactory, stop_checker
from pilotfish_engine.types import WorkerLimits


class Waiting:
    """A heap, in which those that left from the middle stand until they come to its top or are the larger part."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._members: set[Request] = set()
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._members)

    def request(self, submit: Submit, limits: WorkerLimits, stop_text: StopTextFactory | None) -> Request:
        """A new one, behind all of its priority; it does not wait yet."""
        params = submit.params
        return Request(
            request_id=submit.request_id,
            place=(submit.priority, next(self._arrivals)),
            prompt_len=len(submit.prompt),
            token_ids=list(submit.prompt),
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            stops=stop_checker(submit, limits, stop_text),
        )

    def add(self, request: Request) -> None:
        """One that `discard` took out does not come back."""
        self._members.add(request)
        heapq.heappush(self._heap, (request.place, request))

    def first(self) -> Request | None:
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def take_first(self) -> None:
        """After `first`."""
        self._members.discard(heapq.heappop(self._heap)[1])

    def discard(self, request: Request) -> None:
        self._members.discard(request)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
