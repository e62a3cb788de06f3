"""The HTTP process's end of the pair of sockets to the model process: who waits for which output, and is it alive.

Knows nothing about HTTP or text. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from pilotfish_engine import messages
from pilotfish_engine.core import HIGH_WATER_MARK
from pilotfish_engine.errors import PilotfishError, RequestError

MAX_CALLS = 256  # that wait for an answer; of requests the queue keeps count
CALL_SECONDS = 10.0  # a step in progress, such as a long prompt's chunk on a CPU, delays an answer


class CoreGone(PilotfishError):
    """The model process will not answer; the text says why."""


Inbox = asyncio.Queue[messages.Output | CoreGone]
Call = TypeVar("Call", messages.AskReport, messages.SetEnvelope, messages.FlushCache)


class _Wire:
    """Messages over one socket, as bytes."""

    def __init__(self, endpoint: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(messages.FromCore)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    async def receive(self) -> messages.FromCore:
        return self._decoder.decode(await self._socket.recv())

    def send(self, message: messages.ToCore) -> asyncio.Future[Any]:
        """Done at once, or in order as soon as the socket takes it."""
        return asyncio.ensure_future(self._socket.send(self._encoder.encode(message)))

    def close(self) -> None:
        self._context.destroy(linger=0)


class Link:
    """ready: what the loaded model can take, None before. gone: why nothing comes any more."""

    def __init__(self, endpoint: str) -> None:
        self.ready: messages.CoreReady | None = None
        self.failed: str | None = None
        self.gone: CoreGone | None = None
        self.unready: str | None = None
        self.connected = asyncio.Event()
        self.loaded = asyncio.Event()
        self._heard = time.monotonic()
        self._inboxes: dict[str, Inbox] = {}  # of requests that have a place
        self._running: set[str] = set()  # those of them that have not ended
        self._calls: dict[str, asyncio.Future[messages.Answer]] = {}
        self._sending: set[asyncio.Future[Any]] = set()
        self._wire = _Wire(endpoint)

    @property
    def in_flight(self) -> int:
        """Requests that have a place: until they have ended and somebody took their answer. So what is kept for slow
        clients is bounded; and so is what waits for a model process that takes nothing."""
        return max(len(self._inboxes), len(self._sending))

    @property
    def silence(self) -> float:
        """Seconds since the model process was last heard of."""
        return time.monotonic() - self._heard

    async def receive_forever(self) -> None:
        while True:
            message = await self._wire.receive()
            self._heard = time.monotonic()
            self.connected.set()
            match message:
                case messages.Outputs():
                    for output in message.outputs:
                        self._deliver(output)
                case messages.Answer():
                    future = self._calls.pop(message.call_id, None)
                    if future is not None and not future.done():
                        future.set_result(message)
                case messages.Heartbeat():
                    self.unready = message.unready
                case messages.CoreReady():
                    self.ready, self.unready = message, None
                    self.loaded.set()
                case messages.CoreFailed():
                    self.failed = message.sentence

    def _deliver(self, output: messages.Output) -> None:
        inbox = self._inboxes.get(output.request_id)
        if inbox is None:  # aborted; what was on its way is dropped
            return
        if output.finish_reason is not None:
            self._running.discard(output.request_id)
        inbox.put_nowait(output)

    def submit(self, requests: Iterable[messages.Submit]) -> Inbox:
        """One inbox for all of them. An output with a finish_reason is a request's last. Each has a place until it is
        let go. Raises CoreGone."""
        inbox: Inbox = asyncio.Queue()
        for request in requests:
            if self.gone is not None:
                raise self.gone
            self._inboxes[request.request_id] = inbox
            self._running.add(request.request_id)
            self._send(request)
        return inbox

    def let_go(self, request_ids: Iterable[str]) -> None:
        """Aborts those of these requests that have not ended. Never waits: it runs when a client has gone."""
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)
            if request_id in self._running:
                self._running.remove(request_id)
                self._send(messages.Abort(request_id))

    async def call(self, kind: type[Call], **fields: bytes) -> bytes:
        """The answer's body. Raises RequestError with the core's sentence, CoreGone when no answer comes."""
        if self.gone is not None:
            raise self.gone
        if len(self._calls) >= MAX_CALLS:
            raise CoreGone(f"the model process has {MAX_CALLS} questions to answer; try again")
        call_id = uuid.uuid4().hex
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(kind(call_id=call_id, **fields))
            async with asyncio.timeout(CALL_SECONDS):
                answer: messages.Answer = await future
        except TimeoutError:
            raise CoreGone(f"the model process gave no answer within {CALL_SECONDS:.0f} s") from None
        finally:
            self._calls.pop(call_id, None)
        if answer.error is not None:
            raise RequestError(answer.error, answer.field)
        return answer.body

    def end(self, reason: str) -> None:
        """Everything that waits, now or later, gets CoreGone with this reason."""
        self.gone = CoreGone(reason)
        for inbox in set(self._inboxes.values()):
            inbox.put_nowait(self.gone)
        self._inboxes.clear()
        self._running.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.gone)

    def close(self) -> None:
        self._wire.close()

    def _send(self, message: messages.ToCore) -> None:
        """As much can wait as was let in."""
        sending = self._wire.send(message)
        if not sending.done():
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
