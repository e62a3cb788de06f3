"""Bodies on their way: never more together than the budget, the slowest loses, and where none belongs none is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.types import Message

from pilotfish_engine.server.complexity import MAX_NUMBERS, TooComplex, count
from pilotfish_engine.server.failures import ApiError
from pilotfish_engine.server.incoming import MAX_BODY_BYTES, Crowded, Incoming, TooLarge
from tests.engine.server.serving import Engine, engine

BUDGET, LIMIT = 10_000, 4_000


class Sender:
    """A client's side: parts, as the server is given them when they come."""

    def __init__(self, incoming: Incoming, limit: int = LIMIT) -> None:
        self._parts = asyncio.Queue[Message]()
        self.read = asyncio.create_task(incoming.read(Headers({}), self._parts.get, limit))

    async def send(self, part: bytes, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": more})
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def body(self) -> bytes:
        first = await (await self.read)()
        assert not first["more_body"]
        return bytes(first["body"])


@pytest.mark.parametrize("seed", range(5))
async def test_a_body_comes_whole_or_not_at_all_and_never_more_than_the_budget(seed: int) -> None:
    dice, incoming = Random(seed), Incoming(60, BUDGET)
    senders = [Sender(incoming) for _ in range(30)]
    bodies = [dice.randbytes(dice.choice([1, 300, 2000, LIMIT, LIMIT + 1])) for _ in senders]
    sent = [0] * len(senders)
    waiting = list(range(len(senders)))
    while waiting:
        number = dice.choice(waiting)
        begin, end = sent[number], sent[number] + dice.randrange(1, 900)
        sent[number] = end
        await senders[number].send(bodies[number][begin:end], more=end < len(bodies[number]))
        assert 0 <= incoming.bytes <= BUDGET
        if end >= len(bodies[number]):
            waiting.remove(number)
    whole = 0
    for sender, body in zip(senders, bodies, strict=True):
        try:
            assert await sender.body() == body
            whole += 1
        except TooLarge:
            assert len(body) > LIMIT
        except Crowded:
            pass
    assert whole > 0
    assert incoming.bytes == 0, "what has been taken counts no longer"


async def test_those_who_hold_bodies_open_make_room_for_who_sends() -> None:
    incoming = Incoming(60, BUDGET)
    holding = [Sender(incoming) for _ in range(5)]
    for sender in holding:
        await sender.send(b"x" * 1990)
    await asyncio.sleep(0.2)
    quick = Sender(incoming)
    for _ in range(3):
        await quick.send(b"y" * 1300)
    await quick.send(b"", more=False)
    assert await quick.body() == b"y" * 3900
    displaced = [sender for sender in holding if sender.read.done()]
    assert len(displaced) == 2, "as many as it takes"
    for sender in displaced:
        with pytest.raises(Crowded, match="would work"):
            await sender.body()
    for sender in holding:
        sender.read.cancel()
    await asyncio.gather(*(sender.read for sender in holding), return_exceptions=True)
    assert incoming.bytes == 0


async def test_a_client_that_goes_leaves_nothing() -> None:
    incoming = Incoming(0.05, BUDGET)
    slow = Sender(incoming)
    await slow.send(b"x" * 100)
    with pytest.raises(ApiError, match="not complete within"):
        await slow.body()
    assert incoming.bytes == 0


def parts(value: Any) -> tuple[int, int]:
    """What a body is made of: parts, and numbers that another entry of a list or an object follows."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    followed = sum(type(one) in (int, float) for one in inner[:-1])
    own = 1 + max(0, len(inner) - 1) - followed + (len(inner) if isinstance(value, dict) else 0)
    below = [parts(one) for one in inner]
    return own + sum(one for one, _ in below), followed + sum(one for _, one in below)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\{[:,é\u2028'),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('a"\\{[:,'), inner, max_size=5),
    max_leaves=30,
)


@given(VALUES, st.sampled_from([{}, {"ensure_ascii": False}, {"separators": (",", ":")}]))
def test_parts_are_counted_as_a_parser_finds_them(value: Any, form: dict[str, Any]) -> None:
    assert count(json.dumps(value, **form).encode()) == parts(value)


MANY = 40_000
COMPLEX = {
    "fields": {f"u{i}": 0 for i in range(MANY)},
    "lists": {"zz": [[]] * MANY},
    "messages": {"messages": [{"role": "user", "content": "a", "x": [1]}] * MANY},
    "numbers": {"prompt": [7] * (MAX_NUMBERS + 2)},
}


@pytest.mark.parametrize("name", COMPLEX)
async def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(name: str) -> None:
    incoming = Incoming(60)
    sender = Sender(incoming, MAX_BODY_BYTES)
    await sender.send(json.dumps(COMPLEX[name]).encode(), more=False)
    with pytest.raises(TooComplex, match="at most would work"):
        await sender.body()
    assert incoming.bytes == 0


async def test_a_long_text_is_one_part() -> None:
    sender = Sender(Incoming(60), MAX_BODY_BYTES)
    body = json.dumps({"prompt": 'He said: "[a, b], {c}, \\".' * 200_000}).encode()
    await sender.send(body, more=False)
    assert await sender.body() == body


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(tmp_path_factory.mktemp("incoming")) as running:
        yield running


def resident(served: Engine) -> int:
    """Bytes of memory of the process that reads bodies."""
    pages = Path(f"/proc/{served.process.pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


@pytest.mark.parametrize(
    ("method", "path", "most"), [("POST", "/health", 16), ("GET", "/v1/models", 16), ("POST", "/v1/completions", 120)]
)
def test_bodies_that_are_held_open_take_no_more_than_their_budget(
    served: Engine, method: str, path: str, most: int
) -> None:
    """Of 60 connections, each with four megabytes of eight sent. most: megabytes."""
    host, port = served.url.removeprefix("http://").split(":")
    before, connections = resident(served), list[socket.socket]()
    try:
        for _ in range(60):
            connection = socket.create_connection((host, int(port)), timeout=2)
            connections.append(connection)
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES}\r\n\r\n"
            with contextlib.suppress(OSError):  # refused, or not read
                connection.sendall(head.encode() + b" " * (4 << 20))
        with served.http as client:
            assert client.get("/health").status_code == 200
        assert resident(served) - before < most << 20
    finally:
        for connection in connections:
            connection.close()
