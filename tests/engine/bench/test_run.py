"""What a run says of servers that answer well, badly and not at all, beside what they really did."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from pilotfish_engine.bench.client import Choice, Client, Delta, Event, Events, Outcome, Usage
from pilotfish_engine.bench.result import per_token, read
from pilotfish_engine.errors import UsageError
from tests.engine.bench.conftest import FAST, only
from tests.engine.bench.openai_server import DONE, GOOD, answers, delta, overloaded, serving, usage

ROOT = Path(__file__).parents[3]


def test_counts_are_those_of_the_server(run, capsys) -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        while len(server.bodies) < 3:  # the first ones wait for each other
            await asyncio.sleep(0.01)
        return await GOOD(request, body)

    with serving(answer) as server:
        code, result = run(server, *FAST, "--concurrency", "3", "--requests", "10")
    level = only(result)
    assert code == 0
    assert len(server.bodies) == 10
    assert server.at_once == 3
    assert (level.succeeded, level.failed, level.unfinished) == (10, 0, 0)
    assert (level.prompt_tokens, level.completion_tokens, level.cached_tokens) == (70, 30, None)
    assert level.tokens_per_second == pytest.approx(30 / level.seconds)
    assert level.requests_per_second == pytest.approx(10 / level.seconds)
    assert [request.number for request in sorted(level.requests, key=lambda one: one.number)] == list(range(10))
    assert {request.finish_reason for request in level.requests} == {"stop"}
    assert level.acceptance is None
    assert result.model == "first"
    out, err = capsys.readouterr()
    assert "concurrency 3" in out
    assert err == ""  # no terminal, no progress


def test_a_time_per_token_comes_from_usage_not_from_chunks(run) -> None:
    ending = delta("f g h i") + delta(None, "length") + usage(4, 9) + DONE
    with serving(answers(delta("a"), 0.1, delta("b c d e"), 0.1, ending)) as server:
        _, result = run(server, *FAST, "--concurrency", "1", "--requests", "4")
    level = only(result)
    assert level.per_token_ms is not None
    assert level.chunk_gap_ms is not None
    streamed = [request for request in level.requests if request.pieces > 1]
    assert level.per_token_ms.count == len(streamed)
    assert level.chunk_gap_ms.count == sum(request.pieces - 1 for request in streamed)
    seconds = sum((request.ended or 0.0) - (request.first_token or 0.0) for request in streamed)
    assert level.per_token_ms.mean * level.per_token_ms.count * 8 == pytest.approx(1000 * seconds)
    assert level.chunk_gap_ms.mean * level.chunk_gap_ms.count == pytest.approx(1000 * seconds)


def test_times_of_one_answer() -> None:
    """The role at 0.1 s, one token at 0.5 s, four more at 1.0 s in two events of one piece, the last four at 1.7 s."""
    outcome = Outcome(0, 0.0)
    role, text, end = Choice(delta=Delta(content="")), Choice(text="a"), Choice(delta=Delta(), finish_reason="stop")
    for seconds, choice in ((0.1, role), (0.5, text), (1.0, text), (1.0, text), (1.7, text), (1.7, end)):
        outcome.take(Event(choices=[choice]), seconds)
    outcome.take(Event(usage=Usage(3, 9)), 1.8)
    outcome.close()
    assert (outcome.failure, outcome.first, outcome.ended, outcome.pieces) == (None, 0.5, 1.7, 3)
    assert list(outcome.gaps) == pytest.approx([0.5, 0.7])
    assert per_token(outcome) == pytest.approx(1.2 / 8)


def test_the_first_token_is_the_first_text_and_not_the_role(run) -> None:
    opening = (b": a comment\n\n", delta("", role="assistant"), 0.2)
    closing = (delta("text"), delta(" end", "stop"), usage(1, 2), DONE)
    thinking = (delta(None, reasoning_content="hm"), delta("so", "stop"), usage(1, 2), DONE)
    for events in (closing, thinking):
        with serving(answers(*opening, *events)) as server:
            _, result = run(server, *FAST, "--concurrency", "1", "--requests", "2")
        level = only(result)
        assert level.first_token_ms is not None
        assert level.first_token_ms.p50 >= 200


def test_thoughts_are_tokens() -> None:
    for said in (Delta(reasoning_content="hm"), Delta(reasoning="hm"), Delta(tool_calls=[{}]), Delta(content="hm")):
        outcome = Outcome(0, 0.0)
        outcome.take(Event(choices=[Choice(delta=said)]), 2.0)
        assert outcome.first == 2.0


def test_percentiles_are_numpys_over_the_requests_of_the_file(run) -> None:
    ordinal = itertools.count()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        wait = 0.01 * (next(ordinal) % 5)
        return await answers(wait, delta("a"), wait, delta("b", "stop"), usage(2, 2), DONE)(request, body)

    with serving(answer) as server:
        _, result = run(server, *FAST, "--concurrency", "2", "--requests", "20")
    level = only(result)
    began, first, ended = (
        np.array([getattr(request, name) for request in level.requests]) for name in ("began", "first_token", "ended")
    )
    two_pieces = np.array([request.pieces == 2 for request in level.requests])
    expected = {
        "first_token_ms": first - began,
        "end_to_end_ms": ended - began,
        "per_token_ms": (ended - first)[two_pieces],
    }
    for name, seconds in expected.items():
        figures = getattr(level, name)
        assert figures.count == len(seconds)
        assert figures.mean == pytest.approx(1000 * seconds.mean())
        for percent in (50, 90, 95, 99):
            assert getattr(figures, f"p{percent}") == pytest.approx(1000 * np.percentile(seconds, percent))


def test_without_usage_no_token_is_counted(run, capsys) -> None:
    with serving(answers(delta("one"), 0.02, delta("two"), delta(None, "stop"), DONE)) as server:
        code, result = run(server, *FAST, "--concurrency", "1", "--requests", "3")
    level = only(result)
    assert code == 0
    assert (level.completion_tokens, level.tokens_per_second, level.per_token_ms) == (None, None, None)
    gaps = 0 if level.chunk_gap_ms is None else level.chunk_gap_ms.count
    assert gaps == sum(request.pieces - 1 for request in level.requests)
    assert "3 answers without usage" in capsys.readouterr().out


def test_an_answer_in_one_piece_has_no_time_per_token(run, capsys) -> None:
    at_once = delta("one") + delta(" two") + delta(" three") + delta(None, "stop") + usage(7, 3) + DONE
    with serving(answers(0.05, at_once)) as server:
        _, result = run(server, *FAST, "--concurrency", "1", "--requests", "3")
    level = only(result)
    assert (level.completion_tokens, level.per_token_ms, level.chunk_gap_ms) == (9, None, None)
    assert "3 answers in one piece" in capsys.readouterr().out


def test_events_are_whole_however_they_are_cut(run) -> None:
    text = delta("größe") + delta(" 2", "stop") + usage(7, 5) + DONE
    cut = [
        part for place in range(0, len(text), 7) for part in (text[place : place + 7].replace(b"\n", b"\r\n"), 0.001)
    ]
    with serving(answers(*cut)) as server:
        code, result = run(server, *FAST, "--concurrency", "1", "--requests", "2")
    level = only(result)
    assert code == 0
    assert (level.prompt_tokens, level.completion_tokens) == (14, 10)


def test_events_are_the_same_in_any_pieces() -> None:
    text = b'data: {"a": 1}\r\n\r\n: comment\n\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\nrest'
    for size in (1, 3, len(text)):
        events = Events()
        found = [data for at in range(0, len(text), size) for data in events.feed(text[at : at + size])]
        assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_arrivals_are_poissons_and_wait_for_nobody(run) -> None:
    slow = answers(1.0, delta("a"), delta(None, "stop"), usage(1, 1), DONE)
    with serving(slow) as server:
        began = time.perf_counter()
        code, result = run(server, *FAST, "--rate", "100", "--requests", "60", "--seed", "3")
        seconds = time.perf_counter() - began
        again = only(run(server, *FAST, "--rate", "100", "--requests", "60", "--seed", "3")[1])
    level = only(result)
    assert code == 0
    assert server.at_once > 20
    assert seconds < 30  # one after another they would take 60
    due = [request.began for request in sorted(level.requests, key=lambda one: one.number)]
    gaps = np.diff([0.0, *due])
    assert gaps.min() > 0
    assert 0.006 < gaps.mean() < 0.016  # of a mean of 0.01
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.5)
    repeated = [request.began for request in sorted(again.requests, key=lambda one: one.number)]
    assert repeated == pytest.approx(due, abs=1e-6)


def test_a_request_counts_from_when_it_was_due() -> None:
    """Or a client that cannot keep up would hide the queue that it is itself."""

    async def late() -> Outcome:
        async with aiohttp.ClientSession() as session:
            return await Client(session, server.url, "chat", 20).send(0, {"messages": []}, time.perf_counter() - 5)

    with serving(GOOD) as server:
        outcome = asyncio.run(late())
    assert outcome.failure is None
    assert outcome.first is not None
    assert outcome.first - outcome.began >= 5


def test_seconds_end_a_level(run) -> None:
    with serving(GOOD) as server:
        code, result = run(server, *FAST, "--concurrency", "2", "--seconds", "0.5")
    level = only(result)
    assert code == 0
    assert level.succeeded == len(server.bodies) >= 2
    assert max(request.began for request in level.requests) <= 0.5


def test_the_limit_cuts_a_run_off_and_says_so(run, capsys) -> None:
    with serving(answers(delta("a"), 60.0)) as server:
        code, result = run(server, *FAST, "--concurrency", "2,4", "--requests", "5", "--limit", "3")
    level = only(result)
    assert code == 1
    assert (level.succeeded, level.failed, level.unfinished) == (0, 0, 2)
    assert result.interrupted == "--limit 3 s had passed"
    assert "2 requests cut off" in capsys.readouterr().out


def test_warm_up_is_not_counted(run) -> None:
    with serving(GOOD) as server:
        _, result = run(server, *FAST, "--warm-up", "3", "--concurrency", "1,2", "--requests", "4")
    assert len(server.bodies) == 11
    assert [level.succeeded for level in result.levels] == [4, 4]
    asked = [json.dumps(body["messages"]) for body in server.bodies]
    assert len(set(asked)) == 11  # nothing comes from a prefix cache


def test_a_server_that_answers_nothing_ends_the_run_at_once(run) -> None:
    with serving(overloaded) as server, pytest.raises(UsageError, match=r"none of the 4 warm-up.*HTTP 503: 1024 req"):
        run(server, "--concurrency", "1,2,4")
    assert len(server.bodies) == 4


def test_the_request_is_what_was_asked_for(run, tmp_path) -> None:
    (tmp_path / "key").write_text("secret\n")
    flags = ("--warm-up", "0", "--concurrency", "1", "--requests", "2", "--output-len", "9", "--input-len", "11")
    with serving(GOOD, vocabulary=[5, 9, 5, 30]) as server:
        run(server, *flags, "--model", "second", "--temperature", "0.5", "--api-key-file", str(tmp_path / "key"))
    body = server.bodies[0]
    prompt = body.pop("prompt")
    assert len(prompt) == 11
    assert set(prompt) <= {5, 9, 30}
    assert prompt != server.bodies[1]["prompt"]
    assert body == {
        "model": "second",
        "max_tokens": 9,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert server.keys == {"Bearer secret"}
    assert set(server.paths) == {"/v1/completions"}


def test_real_prompts_are_asked_in_turn_and_those_asked_again_are_counted(run, tmp_path, capsys) -> None:
    lines = [json.dumps({"prompt": f"p{n}"}) for n in range(3)]
    lines.append(json.dumps({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "p3"}]}))
    (tmp_path / "p.jsonl").write_text("\n\n".join(lines))
    flags = ("--warm-up", "1", "--concurrency", "1,2", "--requests", "4", "--prompts", str(tmp_path / "p.jsonl"))
    good = answers(delta("x", "stop"), usage(8, 1, cached=6), DONE)
    with serving(good) as server:
        _, result = run(server, *flags)
    asked = [body["messages"][-1]["content"] for body in server.bodies]
    assert sorted(asked[:4]) == ["p0", "p1", "p2", "p3"]
    assert sorted(asked[5:9]) == ["p0", "p1", "p2", "p3"]
    assert all("ignore_eos" not in body for body in server.bodies)
    assert [level.repeated_prompts for level in result.levels] == [1, 4]
    assert [level.cached_tokens for level in result.levels] == [24, 24]
    assert "4 prompts asked before, which a prefix cache may have served (75% of the tokens)" in (
        capsys.readouterr().out
    )
    with serving(good) as other:
        run(other, *flags)
    assert [body["messages"] for body in other.bodies[:5]] == [body["messages"] for body in server.bodies[:5]]


def test_ctrl_c_prints_what_there_is(tmp_path) -> None:
    ordinal = itertools.count()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind = GOOD if next(ordinal) < 6 else answers(60.0)
        return await kind(request, body)

    with serving(answer) as server:
        file = tmp_path / "r.json"
        command = [
            sys.executable, "-W", "error", "-m", "pilotfish_engine.cli", "bench", "--url", server.url, *FAST,
            "--json", str(file), "--concurrency", "2", "--requests", "100",
        ]  # fmt: skip
        environment = {"PYTHONPATH": f"{ROOT}/engine", "PATH": os.environ["PATH"]}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while len(server.bodies) < 8 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == ""
    level = only(read(file))
    assert (level.succeeded, level.failed, level.unfinished) == (6, 0, 2)
    assert "cut short: SIGINT came" in out
    assert "2 requests cut off" in out
