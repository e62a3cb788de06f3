"""Start, drain and death of the two processes, with real signals; and nothing of them left afterwards."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import openai
import pytest

from tests.engine.server.serving import NAME, Engine, alive, engine, wait_until
from tests.engine.server.small_core import CRASH, Behaviour

LONG = {"ignore_eos": True}


def left_behind(started: Engine) -> list[str]:
    return [entry.name for entry in started.folder.iterdir()]


def test_health_answers_while_the_model_loads(empty: Path) -> None:
    with engine(empty, behaviour=Behaviour(load_seconds=1.5), wait=False) as started:
        wait_until(lambda: answers(started), 20)
        assert started.get("/health").status_code == 200
        assert started.get("/ready").json()["reason"] == "the model is loading"
        with started.http as client:
            refused = client.post("/v1/completions", json={"model": NAME, "prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert started.get("/v1/speculation").status_code == 503
        assert started.get("/metrics").status_code == 200
        started.wait_ready()
        assert left_behind(started) == [], "the sockets' folder goes as soon as both are connected"
        assert started.openai().completions.create(model=NAME, prompt="a").choices[0].text == "a"


def answers(started: Engine) -> bool:
    try:
        started.get("/health")
    except OSError:
        return False
    except Exception as error:
        return "connect" not in type(error).__name__.lower()
    return True


def test_sigterm_finishes_what_runs_and_takes_nothing_new(empty: Path) -> None:
    with engine(empty, behaviour=Behaviour(step_seconds=0.02)) as started:
        core = started.core_pid()
        stream = started.openai().completions.create(
            model=NAME, prompt="x", max_tokens=200, stream=True, extra_body=LONG
        )
        next(stream)
        started.process.send_signal(signal.SIGTERM)
        wait_until(lambda: started.get("/ready").status_code == 503, 20)
        assert started.get("/health").status_code == 200
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            started.openai().completions.create(model=NAME, prompt="late")
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert 1 + sum(chunk.choices[0].text.count("x") for chunk in chunks) == 200
        exit_code, errors = started.wait()
        assert exit_code == 0
        assert "Traceback" not in errors
        assert not alive(core)
        assert left_behind(started) == []


def test_what_outlasts_the_drain_is_ended_cleanly(empty: Path) -> None:
    with engine(empty, "--drain-seconds", "0.3", behaviour=Behaviour(step_seconds=0.02)) as started:
        stream = started.openai().completions.create(
            model=NAME, prompt="x", max_tokens=8000, stream=True, extra_body=LONG
        )
        next(stream)
        started.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert started.wait()[0] == 0


def test_sigterm_while_the_model_loads_ends_at_once(empty: Path) -> None:
    with engine(empty, behaviour=Behaviour(load_seconds=30), wait=False) as started:
        wait_until(lambda: answers(started), 20)
        began = time.monotonic()
        assert started.end()[0] == 0
        assert time.monotonic() - began < 2
        assert left_behind(started) == []


def test_a_killed_model_process_ends_streams_with_an_error_and_the_engine_with_it(empty: Path) -> None:
    with engine(empty, behaviour=Behaviour(step_seconds=0.02)) as started:
        stream = started.openai().completions.create(
            model=NAME, prompt="x", max_tokens=8000, stream=True, extra_body=LONG
        )
        next(stream)
        failures: list[openai.APIError] = []
        waiting = threading.Thread(target=lambda: failures.append(failure_of_a_whole_answer(started)))
        waiting.start()
        wait_until(lambda: started.get("/v1/speculation").json()["running"] == 2, 20)
        began = time.monotonic()
        os.kill(started.core_pid(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the model process ended unexpectedly"):
            list(stream)
        waiting.join()
        assert isinstance(failures[0], openai.InternalServerError)
        assert failures[0].code == "engine_gone"
        exit_code, errors = started.wait()
        assert time.monotonic() - began < 2
        assert exit_code == 1
        assert "the model process ended unexpectedly (killed by SIGKILL)" in errors
        assert left_behind(started) == []


def failure_of_a_whole_answer(started: Engine) -> openai.APIError:
    with pytest.raises(openai.APIError) as caught:
        started.openai().completions.create(model=NAME, prompt="y", max_tokens=8000, extra_body=LONG)
    return caught.value


def test_an_exception_in_the_loop_is_a_death_with_its_traceback(empty: Path) -> None:
    with engine(empty) as started:
        with pytest.raises(openai.InternalServerError, match="ended unexpectedly"):
            started.openai().completions.create(model=NAME, prompt=[CRASH])
        exit_code, errors = started.wait()
        assert exit_code == 1
        assert "asked to crash" in errors


def test_a_killed_http_process_takes_the_model_process_with_it(empty: Path) -> None:
    with engine(empty, behaviour=Behaviour(step_seconds=0.5)) as started:
        core = started.core_pid()
        started.process.kill()
        wait_until(lambda: not alive(core), 20)
        assert left_behind(started) == []


def test_a_http_process_killed_while_the_model_loads_takes_it_too(empty: Path) -> None:
    with engine(empty, behaviour=Behaviour(load_seconds=30), wait=False) as started:
        wait_until(lambda: answers(started), 20)
        core = started.core_pid()
        started.process.kill()
        wait_until(lambda: not alive(core), 20)


def test_what_the_model_process_cannot_use_is_one_sentence_and_exit_code_2(empty: Path) -> None:
    sentence = "the draft X has 5 tokens and the target Y has 7; a draft of the same vocabulary would work"
    with engine(empty, behaviour=Behaviour(usage_error=sentence), wait=False) as started:
        assert started.wait() == (2, sentence + "\n")
        assert left_behind(started) == []


def test_a_model_process_that_crashes_while_loading_ends_the_engine(empty: Path) -> None:
    with engine(empty, behaviour=Behaviour(crash_while_loading=True), wait=False) as started:
        exit_code, errors = started.wait()
        assert exit_code == 1
        assert "asked to crash" in errors
        assert "the model process ended unexpectedly (exit code 1)" in errors


def test_a_busy_port_is_known_before_anything_is_loaded(empty: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with engine(empty, "--port", str(port), wait=False) as started:
            exit_code, errors = started.wait()
    assert exit_code == 2
    assert errors.count("\n") == 1
    assert f"--port {port}" in errors
    assert "a free port, or 0 for any, would work" in errors
    assert left_behind(started) == []


@pytest.mark.parametrize(("flag", "known"), [("--tool-call-parser", "hermes"), ("--reasoning-parser", "think")])
def test_a_format_that_nobody_knows_is_one_sentence_before_anything_is_loaded(
    empty: Path, flag: str, known: str
) -> None:
    with engine(empty, flag, "Hermes", behaviour=Behaviour(load_seconds=60), wait=False) as started:
        exit_code, errors = started.wait()
    assert (exit_code, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"{flag} 'Hermes' is unknown; one of auto, none, ")
    assert known in errors.removesuffix(" would work\n").partition("none, ")[2].split(", ")
    assert left_behind(started) == []


def test_two_signals_do_not_wait(empty: Path) -> None:
    with engine(empty, behaviour=Behaviour(step_seconds=0.02)) as started:
        stream = started.openai().completions.create(
            model=NAME, prompt="x", max_tokens=8000, stream=True, extra_body=LONG
        )
        next(stream)
        started.process.send_signal(signal.SIGINT)
        wait_until(lambda: started.get("/ready").status_code == 503, 20)
        assert started.end()[0] == 0
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
