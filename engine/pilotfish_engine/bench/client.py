"""One request: sent, its stream read as it comes, and what became of it.

Knows nothing about levels or figures.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from pilotfish_engine.bench.plan import Api

ROUTES: Mapping[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MAX_EVENT_BYTES = 16 << 20
MAX_ERROR_BYTES = 4096
SHOWN_CHARACTERS = 200
BROKEN_OFF = ("abort", "error")  # finish_reasons of an answer that its server gave up


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def holds_text(self) -> bool:
        """False for the chunk that only opens an answer with its role."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Event(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


@dataclass(frozen=True)
class Failure:
    """cause: the same for all requests that failed in this way. detail: in this one's words."""

    cause: str
    detail: str


@dataclass
class Outcome:
    """Times by time.perf_counter. began: when it was sent, or should have been. first: when the first text came. ended:
    when its finish_reason came. pieces: at how many moments text came, `gaps` seconds apart: several tokens a piece
    where the server speculates."""

    number: int
    began: float
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    pieces: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    usage: Usage | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    def take(self, event: Event, now: float) -> None:
        if event.error is not None:
            self.failure = Failure("error in the stream", _message(event.error))
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices or ():
            if choice.holds_text:
                self._text_came(now)
            if choice.finish_reason is not None:
                self.finish_reason, self.ended = choice.finish_reason, now

    def _text_came(self, now: float) -> None:
        if self.last is None:
            self.first = now
        elif now > self.last:
            self.gaps.append(now - self.last)
        else:
            return
        self.last = now
        self.pieces += 1

    def close(self) -> None:
        """The stream is over: says what is wrong with it, if anything is."""
        if self.failure is not None:
            return
        if self.finish_reason is None:
            self.failure = Failure("stream ended early", "the stream ended without a finish_reason")
        elif self.finish_reason in BROKEN_OFF:
            self.failure = Failure(f"finish_reason {self.finish_reason}", "the server gave the answer up")
        elif self.first is None and (self.usage is None or self.usage.completion_tokens == 0):
            self.failure = Failure("empty answer", "the answer has neither text nor tokens")
        elif self.first is None:  # of tokens without text, such as the one that ends an answer
            self.first = self.last = self.ended


class Events:
    """Server-sent events out of the pieces in which they arrive (WHATWG HTML, section 9.2.6)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of the lines that are complete. Raises ValueError on a line that does not end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, api: Api, timeout: float) -> None:
        self._session = session
        self._url = url + ROUTES[api]
        self._timeout = timeout
        self._decoder = msgspec.json.Decoder(Event)

    async def send(self, number: int, body: Mapping[str, Any], due: float | None = None) -> Outcome:
        """due: when it should have been sent; it counts from then. Raises nothing but what cancels it."""
        encoded = msgspec.json.encode(body)
        outcome = Outcome(number, time.perf_counter() if due is None else due)
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._session.post(self._url, data=encoded, headers={"Content-Type": "application/json"}) as response,
            ):
                await self._read(response, outcome)
        except TimeoutError:
            outcome.failure = Failure("timeout", f"no whole answer within {self._timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            outcome.failure = Failure("cannot connect", str(error))
        except (aiohttp.ClientError, OSError) as error:
            outcome.failure = Failure("connection lost", f"{type(error).__name__}: {error}")
        return outcome

    async def _read(self, response: aiohttp.ClientResponse, outcome: Outcome) -> None:
        if response.status != 200 or response.content_type != "text/event-stream":
            cause = f"HTTP {response.status}" if response.status != 200 else "not a stream"
            outcome.failure = Failure(cause, _message_in(await _beginning(response)))
            return
        events = Events()
        try:
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                for data in events.feed(piece):
                    if data != b"[DONE]":
                        outcome.take(self._decoder.decode(data), now)
                if outcome.failure is not None:
                    return
        except ValueError as error:  # msgspec's too
            outcome.failure = Failure("not OpenAI's stream", str(error))
        outcome.close()


async def _beginning(response: aiohttp.ClientResponse) -> str:
    body = b""
    while len(body) < MAX_ERROR_BYTES and (piece := await response.content.read(MAX_ERROR_BYTES)):
        body += piece
    return body.decode(errors="replace")


def _message_in(text: str) -> str:
    """The message of an error's body, or the beginning of what it is instead."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return _short(text)
    return _message(value.get("error", value) if isinstance(value, dict) else value)


def _message(error: Any) -> str:
    return _short(str(error.get("message", error) if isinstance(error, dict) else error))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
