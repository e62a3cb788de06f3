"""A request that fails is counted by its cause, and gives no figure."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from aiohttp import web

from tests.engine.bench.conftest import FAST, only
from tests.engine.bench.openai_server import DONE, GOOD, answers, chunk, delta, overloaded, serving, stream, usage


async def hangs_up(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def page(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="<h1>Bad\nGateway</h1>", content_type="text/html", status=502)


async def whole(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [{"message": {"content": "no stream"}}]})


FAILING = {
    "HTTP 503": (overloaded, "1024 requests wait; try later"),
    "HTTP 502": (page, "<h1>Bad Gateway</h1>"),
    "not a stream": (whole, "no stream"),
    "error in the stream": (answers(delta("a"), chunk(error={"message": "gone"}), 60.0), "gone"),
    "stream ended early": (answers(delta("a"), usage(1, 1), DONE), "without a finish_reason"),
    "finish_reason abort": (answers(delta("a"), delta(None, "abort"), usage(1, 1), DONE), "gave the answer up"),
    "empty answer": (answers(delta("", role="assistant"), delta(None, "stop"), usage(1, 0), DONE), "neither text"),
    "not OpenAI's stream": (answers(b"data: hello\n\n"), "JSON"),
    "timeout": (answers(delta("a"), 30.0), "no whole answer within 0.3 s"),
    "connection lost": (hangs_up, ""),
}


@pytest.mark.parametrize("cause", FAILING)
def test_what_fails_is_counted_by_its_cause_and_gives_no_figures(run, capsys, cause: str) -> None:
    fails, detail = FAILING[cause]
    patience = "0.3" if cause == "timeout" else "30"
    with serving(fails) as server:
        code, result = run(server, *FAST, "--concurrency", "2", "--requests", "5", "--timeout", patience)
    level = only(result)
    assert code == 1
    assert [(failure.cause, failure.count) for failure in level.failures] == [(cause, 5)]
    assert detail in level.failures[0].example
    assert (level.succeeded, level.failed, level.unfinished) == (0, 5, 0)
    assert level.requests_per_second == 0
    assert level.tokens_per_second is None
    for figures in (level.first_token_ms, level.per_token_ms, level.chunk_gap_ms, level.end_to_end_ms):
        assert figures is None
    assert f"5 failed, {cause}: " in capsys.readouterr().out


def test_failures_beside_successes_count_neither_tokens_nor_times(run, capsys) -> None:
    ordinal = itertools.count()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        number = next(ordinal)
        kind = overloaded if number % 4 == 1 else FAILING["stream ended early"][0] if number % 4 == 3 else GOOD
        return await kind(request, body)

    with serving(answer) as server:
        code, result = run(server, *FAST, "--concurrency", "1", "--requests", "12")
    level = only(result)
    assert code == 1
    assert not level.whole
    assert (level.succeeded, level.failed, level.completion_tokens) == (6, 6, 18)
    assert {failure.cause: failure.count for failure in level.failures} == {"HTTP 503": 3, "stream ended early": 3}
    assert level.first_token_ms is not None
    assert level.first_token_ms.count == 6
    out = capsys.readouterr().out
    assert re.search(r"^concurrency 1 \* +6 +6 ", out, re.MULTILINE)
    assert "of the requests that succeeded; nothing is compared" in out


async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, _nothing())


async def _nothing():
    return
    yield b""


def test_a_stream_of_nothing_is_a_failure(run) -> None:
    with serving(never) as server:
        code, result = run(server, *FAST, "--concurrency", "1", "--requests", "1")
    assert code == 1
    assert only(result).failures[0].cause == "stream ended early"
