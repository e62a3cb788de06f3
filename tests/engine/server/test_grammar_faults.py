"""Grammars that hurt, over HTTP: each is its own request's 400, and others are answered as if they were alone."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.sampling.test_trial import OVERFLOWING
from tests.engine.server import letters
from tests.engine.server.parameters import PROMPT
from tests.engine.server.serving import NAME, Engine

# what only shows while it is followed: behind some letters nothing can come, or too much
LATE = {
    "left recursion": 'start: "ab" x\nx: x "b"\n',
    "parts that exclude each other": 'start: "the " y\ny: A\nA: /[a-c]+/ & /[x-z]+/\n',
    "after many": "start: /a{30}/ x\nx: x /b/\n",
}
ALONE: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "seed": 60, "max_tokens": 120}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = letters.model(letters.tokenizer().get_vocab_size())
    with letters.serving(tmp_path_factory.mktemp("letters"), model) as engine:
        yield engine


def beside(served: Engine, bodies: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Status and text of each, while others ask what is no fault; these are answered as if they were alone."""
    expected = served.openai().completions.create(**ALONE).choices[0].text
    with concurrent.futures.ThreadPoolExecutor(3) as pool, served.http as client:
        others = [pool.submit(lambda: served.openai().completions.create(**ALONE)) for _ in range(6)]
        answers = [client.post("/v1/completions", json={"model": NAME, "prompt": PROMPT} | body) for body in bodies]
        assert [other.result().choices[0].text for other in others] == [expected] * len(others)
    return [(answer.status_code, answer.text) for answer in answers]


def test_what_would_end_the_process_ends_its_own_request(served: Engine) -> None:
    names = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
    asked = [
        {names[one.kind]: json.loads(one.text) if one.kind == "json_schema" else one.text} for one in OVERFLOWING
    ]
    for status, text in beside(served, [{"structured_outputs": one} for one in asked]):
        error = json.loads(text)["error"]
        assert (status, error["param"].partition(".")[0]) == (400, "structured_outputs"), error
        assert "would work" in error["message"]


@pytest.mark.parametrize("name", LATE)
def test_a_fault_that_shows_while_decoding_is_the_client_s(served: Engine, name: str) -> None:
    body = {"structured_outputs": {"grammar": LATE[name]}, "max_tokens": 90, "temperature": 0}
    (status, text), (streamed_status, streamed) = beside(served, [body, body | {"stream": True}])
    error = json.loads(text)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "structured_outputs"), text
    assert "cannot be followed further: " in error["message"]
    assert "<non-verbose" not in error["message"]
    assert streamed_status == 200, streamed
    events = [json.loads(line[len("data: ") :]) for line in streamed.split("\n") if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events[:-1]), "what came before it"
    assert events[-1]["error"] == error
