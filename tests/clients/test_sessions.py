"""The recorded sessions of every client, asked again of a server with a random model: each request gets the status that
its client counted on, and an answer of the form that OpenAI publishes.

Record anew with `python -m tests.clients --record`; the clients themselves run with `make clients`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import environments, specification, stub
from tests.clients.canned import Json
from tests.clients.model import random_model
from tests.engine.server.serving import Engine, free_port, launched

SESSIONS = Path(__file__).with_name("sessions")
CLIENTS = sorted(path.stem for path in SESSIONS.glob("*.jsonl"))
AT_ONCE = 4

# What clients send that OpenAI's document does not allow: (client, what a complaint about it begins with).
BEYOND_OPENAI = {
    ("guidellm", "responses: input: "),  # a message without its type
    ("guidellm", "responses: max_output_tokens: 6 "),  # 16 is the document's least
    ("instructor", "responses_tools: tools.0: "),  # a tool without `strict`
    ("instructor", "partial_answers_streamed: tools.0: "),
    ("langchain-openai", "responses: tools.0: "),
    ("llm-comply", "open-responses tool-calling: tools.0: "),
    ("langchain-openai", "completions: logprobs: null "),
    ("langchain-openai", "completions: seed: null "),
    ("lm-eval", "five_stops: stop: "),  # five of them
    ("lm-eval", "five_stops_at_once: stop: "),
    ("openai", "parse_and_go_on: messages.1: "),  # an answer's message with its nulls
    ("openai", "stream_and_go_on: messages.1: "),
    ("openai", "answers_as_dictionaries_go_back: messages.1: "),
    ("vllm-bench", "completions: logprobs: null "),
    ("vllm-bench", "completions_to_the_full_length: logprobs: null "),
    ("vllm-bench", "completions_with_every_setting: logprobs: null "),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("sessions")
    made = random_model(folder)
    port = free_port()
    command = [
        sys.executable, "-m", "pilotfish_engine.cli", "serve", str(made), "--port", str(port),
        "--served-name", stub.MODEL, "--max-running-requests", str(AT_ONCE),
    ]  # fmt: skip
    with launched(command, port, folder) as started:
        yield started


def requests_of(client: str) -> list[Json]:
    return [json.loads(line) for line in (SESSIONS / f"{client}.jsonl").read_text().splitlines()]


async def ask(http: httpx.AsyncClient, request: Json) -> tuple[int, str, list[Any]]:
    """The status, the content type, and what was told: the one value or the events."""
    answer = await http.request(
        request["method"], request["path"], headers=request["headers"],
        content=None if request["body"] is None else json.dumps(request["body"]),
    )  # fmt: skip
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind != specification.EVENTS:
        return answer.status_code, kind, [answer.json()] if kind == specification.JSON else []
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    if not request["path"].startswith("/v1/responses"):
        assert events.pop() == "[DONE]"
    return answer.status_code, kind, [json.loads(event) for event in events]


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_recorded_session_is_served_in_the_form_that_openai_publishes(server: Engine, client: str) -> None:
    requests = requests_of(client)
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:

        async def one(request: Json) -> list[str]:
            async with room:
                status, kind, told = await ask(http, request)
            where = f"{request['scenario']} {request['path']}"
            if status != request["status"]:
                return [f"{where}: {status} instead of {request['status']}: {told}"]
            wrong = specification.of_answer(request["method"], request["path"], status, told, kind)
            return [f"{where}: {problem}" for problem in wrong]

        problems = [problem for found in await asyncio.gather(*map(one, requests)) for problem in found]
    assert not problems, "\n".join(problems[:20])


@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_send_is_what_openai_publishes_but_for_what_is_known(client: str) -> None:
    known = {start for name, start in BEYOND_OPENAI if name == client}
    complaints = [
        f"{request['scenario']}: {complaint}"
        for request in requests_of(client)
        if request["status"] == 200
        for complaint in specification.of_request(request["method"], request["path"], request["body"])
    ]
    assert [text for text in complaints if not text.startswith(tuple(known))] == []
    assert {start for start in known if not any(text.startswith(start) for text in complaints)} == set()


def test_every_client_with_pins_has_a_session() -> None:
    assert environments.names() == CLIENTS
