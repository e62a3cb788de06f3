"""One client's connection: uvicorn's HTTP/1.1, with an end for a client that is waited for in vain.

Knows nothing about requests. The body of a request that is being served, the gate waits for.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_TCP_CLOSE = 7
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Patience:
    """For how long a client is waited for. idle: without a request; longer than clients and balancers keep unused
    connections, or they would send into one that just closes. head, body: until it is complete. unread: with an answer
    of which it takes nothing. last: when the engine ends, whatever is under way."""

    idle_seconds: int = 75
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    unread_seconds: float = 60.0
    last_seconds: int = 4


def _is_reset(transport: asyncio.Transport) -> bool:
    """Linux tells a connection's state in the first byte of TCP_INFO."""
    information = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return bool(information[0] == _TCP_CLOSE)


class Connection(H11Protocol):
    """A client that sends, listens and goes when it likes, within this patience."""

    patience = Patience()
    _owed: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _last: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _silent = False  # nothing more comes from the client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_client()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_client()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._silent and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
        self._wait_for_client()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # within an answer, or behind it
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.patience.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has said all it will may still listen. One that has gone answers the next bytes with a
        reset: while it is owed the beginning of an answer, it is sent 100 Continue, which every client skips."""
        served = self.cycle is not None and not self.cycle.response_complete
        if not served or self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            return False
        self._silent = True
        if not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._look_for_reset()
        return True

    def _look_for_reset(self) -> None:
        if _is_reset(self.transport):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(_LOOK_SECONDS, self._look_for_reset)

    def shutdown(self) -> None:
        self._last = self.loop.call_later(self.patience.last_seconds, self.transport.abort)
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._owed, self._unread, self._last, self._look):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _wait_for_client(self) -> None:
        """Time runs for a head that has begun, for the connection's first, and for what is left of a body whose
        request has been answered, which is thrown away."""
        client, server = self.conn.their_state, self.conn.our_state
        head = client is h11.IDLE and self.timeout_keep_alive_task is None
        rest = client is h11.SEND_BODY and server is h11.DONE
        if not (head or rest or self._owed is None):
            self._owed.cancel()
            self._owed = None
        elif (head or rest) and self._owed is None and not self.transport.is_closing():
            seconds = self.patience.head_seconds if head else self.patience.body_seconds
            self._owed = self.loop.call_later(seconds, self.transport.abort)


def patient(patience: Patience) -> type[asyncio.Protocol]:
    """What uvicorn makes of each connection."""
    return type("Connection", (Connection,), {"patience": patience})
