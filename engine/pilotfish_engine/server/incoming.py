"""Reads the bodies of requests. Each has its route's limit, and all that come at once share a budget.

Where the budget is full the slowest one loses its place: what came of it over the time that it took. So clients that
hold bodies open take no more memory than the budget, and no room from those who send theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from pilotfish_engine.server import complexity
from pilotfish_engine.server.failures import ApiError
from pilotfish_engine.server.streaming import ClientGone

MAX_BODY_BYTES = 8 << 20
MAX_SETTING_BYTES = 64 << 10  # of a route that changes a setting
MAX_INCOMING_BYTES = 8 * MAX_BODY_BYTES
YOUNG_SECONDS = 0.05  # a rate over less time says nothing
CLOSE = {"Connection": "close"}  # of a body that comes slowly the rest is not waited for


class TooLarge(ApiError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            413, f"the body is larger than {limit} bytes; a smaller one would work", code="body_too_large"
        )


class TooSlow(ApiError):
    def __init__(self, seconds: float) -> None:
        super().__init__(
            408, f"the body was not complete within {seconds:g} s; send it faster", code="body_too_slow", headers=CLOSE
        )


class Crowded(ApiError):
    def __init__(self) -> None:
        super().__init__(
            503,
            "more is being sent at once than there is room for, and this body came slowest; the same again, in a "
            "moment or faster, would work",
            code="bodies_too_large_together",
            headers={**CLOSE, "Retry-After": "1"},
        )


@dataclass(eq=False)
class _Coming:
    begun: float
    deadline: asyncio.Timeout
    body: bytearray = field(default_factory=bytearray)
    displaced: bool = False


class Incoming:
    """The bodies that are on their way, or have come and are not taken yet. seconds: that one may take."""

    def __init__(self, seconds: float, most: int = MAX_INCOMING_BYTES) -> None:
        self._seconds = seconds
        self._most = most
        self._coming: set[_Coming] = set()
        self.bytes = 0

    async def read(self, headers: Headers, receive: Receive, limit: int) -> Receive:
        """Gives the body as one message, and then what comes: the disconnect. Raises ApiError and ClientGone. A body
        that is not allowed to be is not read: what comes of it the server throws away."""
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > limit > 0:
            raise TooLarge(limit)
        if limit == 0:
            return _replay(b"", receive, lambda: None)
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                coming = _Coming(asyncio.get_running_loop().time(), deadline)
                await self._whole(coming, receive, limit)
        except TimeoutError:
            raise (Crowded() if coming.displaced else TooSlow(self._seconds)) from None
        if coming.displaced:  # in the moment in which its last part came
            raise Crowded
        size, body = len(coming.body), bytes(coming.body)
        coming.body.clear()
        try:
            await complexity.check(body)
        except BaseException:
            self._give_back(size)
            raise
        return _replay(body, receive, lambda: self._give_back(size))

    async def _whole(self, coming: _Coming, receive: Receive, limit: int) -> None:
        self._coming.add(coming)
        complete = False
        try:
            while not complete:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                if len(coming.body) + len(part) > limit:
                    raise TooLarge(limit)
                self._add(coming, part)
                complete = not message.get("more_body", False)
        finally:
            if coming in self._coming:
                self._coming.discard(coming)
                if not complete:
                    self._give_back(len(coming.body))

    def _add(self, coming: _Coming, part: bytes) -> None:
        now = asyncio.get_running_loop().time()
        self.bytes += len(part)
        coming.body += part
        while self.bytes > self._most and self._coming:
            slowest = min(self._coming, key=lambda one: len(one.body) / max(YOUNG_SECONDS, now - one.begun))
            self._coming.discard(slowest)
            self._give_back(len(slowest.body))
            slowest.displaced = True
            slowest.body.clear()
            if slowest is coming:
                raise Crowded
            slowest.deadline.reschedule(now)

    def _give_back(self, size: int) -> None:
        self.bytes -= size


def _replay(body: bytes, receive: Receive, taken: Callable[[], None]) -> Receive:
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}
    del body

    async def replayed() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None
        taken()
        return message

    return replayed
