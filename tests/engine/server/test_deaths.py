"""SIGKILL of each process in turn while answers are under way, and SIGSTOP: clients are told or their connection ends,
no process, file or port is left, and an engine started in the same place serves at once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from pilotfish_engine.server.service import READY_SILENCE
from tests.engine.server.killing import SLOWER, kill_within_a_stream
from tests.engine.server.serving import NAME, Engine, alive, engine, free_port, wait_until
from tests.engine.server.small_core import CRASH, Behaviour
from tests.engine.worker.test_ranks import START_SECONDS, model, served, wait_ready

__all__ = ["model"]  # the fixture

@pytest.mark.parametrize("which", ["http", "model"])
def test_a_killed_process_leaves_nothing_and_the_next_engine_serves_at_once(empty: Path, which: str) -> None:
    port = str(free_port())
    flags = ("--port", port, "--max-model-len", "200000")
    with engine(empty, *flags, behaviour=Behaviour(step_seconds=0.01), wait=False) as started:
        started.url = f"http://127.0.0.1:{port}"
        started.wait_ready()
        victim = started.process.pid if which == "http" else started.core_pid()
        last = kill_within_a_stream(started, victim)
        if which == "model":
            assert b"the model process ended unexpectedly (killed by SIGKILL)" in last
        assert started.wait()[0] == (-signal.SIGKILL if which == "http" else 1)
        with engine(empty, *flags, wait=False) as another:
            another.url = started.url
            another.wait_ready()
            assert another.openai().completions.create(model=NAME, prompt="a").choices[0].text == "a"


def test_a_killed_renderer_of_templates_is_replaced(empty: Path) -> None:
    with engine(empty) as started:
        said = chat(started)
        (renderer,) = started.text_pids()
        os.kill(renderer, signal.SIGKILL)
        assert chat(started) == said
        assert started.end()[0] == 0


def chat(started: Engine) -> str | None:
    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
    return started.openai().chat.completions.create(model=NAME, messages=asked).choices[0].message.content


def test_a_killed_http_process_takes_every_rank_with_it(model: Path, empty: Path) -> None:
    with served(model, empty, "--tensor-parallel-size", "2", "--method", "None") as started:
        wait_ready(started)
        kill_within_a_stream(started, started.process.pid)


def test_a_model_process_that_stands_still_is_unready_until_it_goes_on(empty: Path) -> None:
    with engine(empty, "--max-model-len", "2000", behaviour=Behaviour(step_seconds=0.01)) as started:
        parts = started.openai().completions.create(
            model=NAME, prompt="x", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(parts)
        core = started.core_pid()
        os.kill(core, signal.SIGSTOP)
        try:
            began = time.monotonic()
            wait_until(lambda: started.get("/ready").status_code == 503, READY_SILENCE * SLOWER)
            assert time.monotonic() - began > READY_SILENCE / 2
            assert "the model process has been silent for" in started.get("/ready").json()["reason"]
            assert started.get("/health").status_code == 200
            with pytest.raises(openai.InternalServerError, match="silent"):
                started.openai().completions.create(model=NAME, prompt="late")
        finally:
            os.kill(core, signal.SIGCONT)
        wait_until(lambda: started.get("/ready").status_code == 200, START_SECONDS)
        assert 1 + sum(chunk.choices[0].text.count("x") for chunk in parts) == 1000
        os.kill(core, signal.SIGSTOP)
        assert started.end()[0] == 0
        assert not alive(core)


def test_what_killed_the_model_process_is_the_operators_to_read_not_the_clients(empty: Path) -> None:
    with engine(empty) as started:
        with pytest.raises(openai.InternalServerError) as caught:
            started.openai().completions.create(model=NAME, prompt=[CRASH])
        assert "ended unexpectedly (exit code 1)" in str(caught.value)
        assert "asked to crash" not in str(caught.value)
        _, errors = started.wait()
        assert errors.splitlines()[-2:] == [
            "the model process ended unexpectedly (exit code 1)", "AssertionError: asked to crash",
        ]  # fmt: skip
