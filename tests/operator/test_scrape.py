"""Reading engines: what they may send, what each refusal means, and that none costs another."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pilotfish_engine.contract.speculation import Envelope, EnvelopeUpdate
from pilotfish_operator.scrape import client
from pilotfish_operator.scrape.client import (
    BadReport,
    Broken,
    Busy,
    EngineError,
    Engines,
    EnvelopeRefused,
    NoRoute,
    TokenRefused,
)  # fmt: skip
from pilotfish_operator.scrape.findings import Target
from pilotfish_operator.scrape.rounds import Rounds
from tests.operator.engines import report

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
GOOD = report().model_dump_json()
BOMB = gzip.compress(b" " * 20_000_000)


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[int]:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        assert server.port
        yield server.port


async def flood(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b" " * 65536)
    return response


async def trickle(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)
    return response


async def bomb(_: web.Request) -> web.StreamResponse:
    return web.Response(body=BOMB, headers={"Content-Encoding": "gzip"})


async def elsewhere(request: web.Request) -> web.StreamResponse:
    if request.path == client.PATH:
        raise web.HTTPFound("/other")
    return web.Response(text=GOOD)


async def long_header(_: web.Request) -> web.StreamResponse:
    return web.Response(text=GOOD, headers={"X-Long": "x" * 100_000})


@pytest.mark.parametrize(
    ("answer", "kind", "word"),
    [
        (flood, BadReport, "more than 256 KiB"),
        (trickle, EngineError, "no answer from"),
        (bomb, BadReport, "packed"),
        (elsewhere, BadReport, "answered 302"),
        (long_header, EngineError, "cannot be reached"),
    ],
)
async def test_a_read_ends_whatever_is_sent(
    answer: Answer, kind: type[EngineError], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT", aiohttp.ClientTimeout(total=0.5))
    async with serving(answer) as port, Engines() as engines:
        with pytest.raises(kind, match=word):
            await engines.report("127.0.0.1", port)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, EnvelopeRefused), (401, TokenRefused), (403, TokenRefused), (404, NoRoute), (405, NoRoute),
     (409, EnvelopeRefused), (422, EnvelopeRefused), (429, Busy), (500, Broken), (502, Broken), (503, Busy)],
)  # fmt: skip
async def test_each_refusal_has_its_meaning(status: int, kind: type[EngineError]) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text="no\nsuch\tluck \x1b[31m", headers={"Retry-After": "7"})

    async with serving(answer) as port, Engines() as engines:
        with pytest.raises(EngineError) as caught:
            await engines.put("127.0.0.1", port, "t", Envelope())
    assert type(caught.value) is kind
    assert caught.value.retry_after == 7.0
    assert str(caught.value).isprintable()


async def test_the_admin_token_goes_along_with_puts_alone() -> None:
    sent: list[tuple[str, str | None]] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append((request.method, request.headers.get("Authorization")))
        return web.Response(text=GOOD)

    async with serving(answer) as port, Engines() as engines:
        await engines.report("127.0.0.1", port)
        await engines.put("127.0.0.1", port, "secret", Envelope())
    assert sent == [("GET", None), ("PUT", "Bearer secret")]


class Pods:
    """Rounds over servers of the test, and what they brought."""

    def __init__(self, engines: Engines, period: float = 0.05) -> None:
        self.turns: asyncio.Queue[str] = asyncio.Queue()
        self.rounds: Rounds[str] = Rounds(engines, period, self.turns.put_nowait, lambda: True)

    async def until(self, key: str, look: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not look():
                while await self.turns.get() != key:
                    pass


def target(name: str, port: int, restarts: int = 0) -> Target:
    return Target(f"uid-{name}", name, "127.0.0.1", port, restarts)


async def test_what_hangs_costs_neither_other_models_nor_more_than_one_limit_of_time() -> None:
    asked, release = 0, asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await release.wait()
        return web.Response()

    async def good(_: web.Request) -> web.Response:
        return web.Response(text=GOOD)

    async with serving(hang) as hanging, serving(good) as well, Engines() as engines:
        pods = Pods(engines)
        for i in range(32):
            pods.rounds.follow(f"bad{i}", [target(f"b{i}", hanging)], "t", None)
        await asyncio.sleep(0)
        pods.rounds.follow("good", [target("g", well)], "t", None)
        for _ in range(5):
            await pods.until("good", lambda: pods.rounds.learn("good"))
        assert pods.rounds.seen("good").reports
        assert not any(pods.rounds.learn(f"bad{i}") for i in range(32))  # none of them has ended its first read
        assert asked <= 32
        release.set()
        pods.rounds.forget_all()


async def test_a_pod_is_unread_after_a_second_miss_and_then_asked_ever_more_seldom() -> None:
    status = 200
    asked = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text=GOOD, status=status)

    async with serving(answer) as port, Engines() as engines:
        pods = Pods(engines, 0.02)
        pods.rounds.follow("m", [target("p", port)], "t", None)
        await pods.until("m", lambda: pods.rounds.seen("m").reports)
        status = 500
        await pods.until("m", lambda: pods.rounds.seen("m").unread)
        assert "answered 500" in pods.rounds.seen("m").unread["uid-p"]
        for _ in range(60):
            await pods.until("m", lambda: pods.rounds.learn("m"))
        assert asked < 25  # of more than 60 rounds
        status = 200
        pods.rounds.follow("m", [target("p", port, restarts=1)], "t", None)  # started anew: asked anew
        await pods.until("m", lambda: pods.rounds.seen("m").reports)
        pods.rounds.forget_all()


@pytest.mark.parametrize(
    ("status", "word", "again"),
    [(401, "another admin token", True), (404, "answered 404", True), (429, "answered 429", True),
     (500, "answered 500", True), (400, "refuses", False), (200, "reports others", True)],
)  # fmt: skip
async def test_settings_that_a_pod_does_not_take_are_a_drift_with_its_words(
    status: int, word: str, again: bool
) -> None:
    puts, held = 0, Envelope()

    async def answer(request: web.Request) -> web.Response:
        nonlocal puts, held
        if request.method == "PUT":
            puts += 1
            if status and (status != 200):
                return web.Response(status=status, text="because")
            if not status:
                held = EnvelopeUpdate.model_validate_json(await request.read()).applied_to(held)
        return web.Response(text=report(envelope=held.model_dump()).model_dump_json())

    async with serving(answer) as port, Engines() as engines:
        pods = Pods(engines, 0.02)
        pods.rounds.follow("m", [target("p", port)], "old", Envelope(num_steps=2))
        await pods.until("m", lambda: pods.rounds.seen("m").drift)
        assert word in pods.rounds.seen("m").drift["uid-p"].why
        await pods.until("m", lambda: puts > 1 or not again)
        for _ in range(10):
            await pods.until("m", lambda: pods.rounds.learn("m"))
        assert (puts > 1) == again
        status = 0
        pods.rounds.follow("m", [target("p", port)], "new", Envelope(num_steps=2 if again else 3))
        await pods.until("m", lambda: not pods.rounds.seen("m").drift)
        assert held.num_steps == (2 if again else 3)
        pods.rounds.forget_all()


async def test_a_lie_is_doubted_and_left_out_of_the_round() -> None:
    total = 10.0

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=report(concurrency_seconds_total=total, uptime_seconds=None).model_dump_json())

    async with serving(answer) as port, Engines() as engines:
        pods = Pods(engines, 0.02)
        pods.rounds.follow("m", [target("p", port)], "t", None)
        await pods.until("m", lambda: pods.rounds.seen("m").reports)
        total = 1e12
        pods.rounds.learn("m")
        await pods.until("m", lambda: pods.rounds.seen("m").doubted)
        assert "jumped" in pods.rounds.seen("m").doubted["uid-p"]
        rounds = pods.rounds.learn("m")
        assert rounds[-1].serving == ("uid-p",)
        assert not rounds[-1].reports
        pods.rounds.forget_all()
