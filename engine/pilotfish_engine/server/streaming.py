"""Answers that notice when nobody listens any more: server-sent events, and single answers that can be called off.

Knows nothing about what is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
_OBFUSCATED_BYTES = 512


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. When the client goes first, cancels it and raises ClientGone. Call with the body read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Event:
    """A server-sent event that has a name."""

    name: str
    data: bytes


class EventStream(StreamingResponse):
    """Server-sent events, those without a name as the bytes of their data. `close` is called in the end, whatever
    happens."""

    def __init__(self, events: AsyncGenerator[bytes | Event, None], close: Callable[[], None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__((), headers=headers, media_type="text/event-stream")
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._close()
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": _written(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def obfuscated(message: dict[str, Any]) -> bytes:
    """Fills a message's JSON up, so that all with a few tokens are as long."""
    missing = -len(msgspec.json.encode(message)) % _OBFUSCATED_BYTES
    return msgspec.json.encode(message | {"obfuscation": "x" * missing})


def _written(event: bytes | Event) -> bytes:
    if isinstance(event, bytes):
        return b"data: " + event + b"\n\n"
    return b"event: " + event.name.encode() + b"\ndata: " + event.data + b"\n\n"
