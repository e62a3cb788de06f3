"""What is refused, how, and with which field's name: OpenAI's error body every time."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotfish_engine.server.incoming import MAX_BODY_BYTES
from tests.engine.server.serving import NAME, Engine, engine

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
PLAIN = {"model": NAME, "prompt": "hi"}


def without(body: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != field}


CHATS: list[tuple[dict[str, Any], str, str]] = [
    (CHAT | {"temperature": -1}, "temperature", "greater than or equal to 0"),
    (CHAT | {"temperature": 2.5}, "temperature", "less than or equal to 2"),
    (CHAT | {"temperature": "hot"}, "temperature", "valid number"),
    (CHAT | {"top_p": 0}, "top_p", "greater than 0"),
    (CHAT | {"top_p": 1.5}, "top_p", "less than or equal to 1"),
    (CHAT | {"top_k": -2}, "top_k", "greater than or equal to -1"),
    (CHAT | {"min_p": 2}, "min_p", "less than or equal to 1"),
    (CHAT | {"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    (CHAT | {"max_tokens": "5"}, "max_tokens", "valid integer"),
    (CHAT | {"max_tokens": True}, "max_tokens", "valid integer"),
    (CHAT | {"max_completion_tokens": 1.5}, "max_completion_tokens", "valid integer"),
    (CHAT | {"n": 0}, "n", "greater than or equal to 1"),
    (CHAT | {"n": 129}, "n", "less than or equal to 128"),
    (CHAT | {"seed": 1 << 70}, "seed", "less than"),
    (CHAT | {"stop": ["a"] * 65}, "stop", "at most 64"),
    (CHAT | {"stop": ""}, "stop[0]", "at least 1"),
    (CHAT | {"stop": "x" * 1025}, "stop[0]", "at most 1024"),
    (CHAT | {"stop": 7}, "stop", "valid list"),
    (CHAT | {"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
    (CHAT | {"stream": "yes"}, "stream", "valid boolean"),
    (CHAT | {"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
    (CHAT | {"prompt": "hi"}, "prompt", "messages would work"),
    (CHAT | {"echo": True}, "echo", "not served"),
    (CHAT | {"max_new_tokens": 5}, "max_new_tokens", "max_tokens would work"),
    (CHAT | {"reasoning_effort": "most"}, "reasoning_effort", "'minimal'"),
    (CHAT | {"metadata": {"k": 1}}, "metadata.k", "valid string"),
    (without(CHAT, "model"), "model", "is required"),
    (without(CHAT, "messages"), "messages", "is required"),
    (CHAT | {"messages": []}, "messages", "at least 1"),
    (CHAT | {"messages": "hi"}, "messages", "valid list"),
    (CHAT | {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'assistant'"),
    (CHAT | {"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    (CHAT | {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is required"),
    (
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "of type text",
    ),
    (CHAT | {"messages": [{"role": "user", "content": "word " * 600}]}, "messages", "maximum context length is 512"),
    (CHAT | {"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages", "characters"),
]
COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    (PLAIN | {"best_of": 2}, "best_of", "1 would work"),
    (PLAIN | {"n": 128, "structured_outputs": {"regex": "a" * 300_000}}, "n", "at most would work"),
    (PLAIN | {"suffix": "x"}, "suffix", "not served"),
    (PLAIN | {"logprobs": 21}, "logprobs", "less than or equal to 20"),
    (PLAIN | {"logprobs": True}, "logprobs", "valid integer"),
    (PLAIN | {"tools": [{}]}, "tools", "not served"),
    (without(PLAIN, "prompt"), "prompt", "is required"),
    (PLAIN | {"prompt": []}, "prompt", "would work"),
    (PLAIN | {"prompt": ""}, "prompt", "is empty"),
    (PLAIN | {"prompt": [["a"]]}, "prompt", "would work"),
    (PLAIN | {"prompt": [1.5]}, "prompt", "would work"),
    (PLAIN | {"prompt": [True]}, "prompt", "would work"),
    (PLAIN | {"prompt": {"a": 1}}, "prompt", "would work"),
    (PLAIN | {"prompt": [-5]}, "prompt", "token id -5"),
    (PLAIN | {"prompt": [49152]}, "prompt", "from 0 to 49151"),
    (PLAIN | {"prompt": ["a"] * 129}, "prompt", "1 to 128"),
    (PLAIN | {"prompt": ["a"] * 100, "n": 2}, "n", "at most 128"),
    (PLAIN | {"prompt": [33] * 512}, "prompt", "has 512 tokens"),
    (PLAIN | {"messages": []}, "messages", "prompt would work"),
]


@pytest.mark.parametrize(("body", "field", "sentence"), CHATS)
def test_bad_chats_are_refused_by_field(served: Engine, body: dict[str, Any], field: str, sentence: str) -> None:
    check_refused(served, "/v1/chat/completions", body, field, sentence)


@pytest.mark.parametrize(("body", "field", "sentence"), COMPLETIONS)
def test_bad_completions_are_refused_by_field(served: Engine, body: dict[str, Any], field: str, sentence: str) -> None:
    check_refused(served, "/v1/completions", body, field, sentence)


def check_refused(served: Engine, path: str, body: dict[str, Any], field: str, sentence: str) -> None:
    with served.http as client:
        # with escapes, by which JSON can say what is no text
        answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert error["type"] == "invalid_request_error"
    assert sentence in error["message"]
    assert field.split("[")[0] in error["message"]


FUNCTION = {"name": "f"}
TOOL = {"type": "function", "function": FUNCTION}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}


def messages(**fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [{"role": "assistant", "content": "x"} | fields]}


def called(**fields: Any) -> dict[str, Any]:
    """A message with a call whose function has these fields."""
    return messages(tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"} | fields}])


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else {}


STRUCTURES: list[tuple[dict[str, Any], str, str]] = [
    (CHAT | {"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
    (CHAT | {"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
    (CHAT | {"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.1"),
    (CHAT | {"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
    (CHAT | {"logit_bias": {"one": 1}}, "logit_bias", "'one' is none"),
    (CHAT | {"logit_bias": {"01": 1}}, "logit_bias", "'01' is none"),
    (CHAT | {"logit_bias": {"49152": 1}}, "logit_bias", "ids from 0 to 49151"),
    (CHAT | {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300"),
    (CHAT | {"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    (CHAT | {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most 4 would work"),
    (CHAT | {"min_tokens": 600}, "min_tokens", "what the prompt leaves of the context"),
    (CHAT | {"priority": 1 << 31}, "priority", "less than 2147483648"),
    (CHAT | {"logprobs": 1}, "logprobs", "valid boolean"),
    (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    (CHAT | {"top_logprobs": 1}, "top_logprobs", "needs logprobs: true"),
    (CHAT | {"response_format": {"type": "yaml"}}, "response_format.type", "'json_schema'"),
    (CHAT | {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    (CHAT | {"response_format": FORM | {"type": "text"}}, "response_format.json_schema", "belongs to no other"),
    (CHAT | {"response_format": FORM | {"json_schema": {}}}, "response_format.json_schema.schema", "is required"),
    (
        CHAT | {"response_format": FORM | {"json_schema": {"schema": nested(101)}}},
        "response_format.json_schema.schema",
        "nested deeper than 100",
    ),
    (CHAT | {"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    (CHAT | {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
    (CHAT | {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    (CHAT | {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]", "at least 1"),
    (CHAT | {"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex", "surrogate"),
    (CHAT | {"structured_outputs": {"json": {"a": float("nan")}}}, "structured_outputs.json", "no JSON"),
    (CHAT | {"structured_outputs": {"json": {"\udc00": 1}}}, "structured_outputs.json", "no JSON"),
    (
        CHAT | {"structured_outputs": {"regex": "a"}, "response_format": FORM},
        "structured_outputs",
        "exclude each other",
    ),
    (CHAT | {"guided_json": {}}, "guided_json", "response_format"),
    (CHAT | {"regex": "a"}, "regex", "structured_outputs with a regex would work"),
    (CHAT | {"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    (CHAT | {"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    (CHAT | {"tools": [TOOL | {"function": {"name": "a b"}}]}, "tools[0].function.name", "match pattern"),
    (CHAT | {"tools": [TOOL | {"function": {"name": "f" * 65}}]}, "tools[0].function.name", "match pattern"),
    (
        CHAT | {"tools": [TOOL | {"function": FUNCTION | {"parameters": []}}]},
        "tools[0].function.parameters",
        "valid dict",
    ),
    (CHAT | {"tools": [TOOL, TOOL]}, "tools", "two functions named 'f'"),
    (CHAT | {"tools": [TOOL] * 129}, "tools", "at most 128"),
    (CHAT | {"tools": [TOOL]}, "tools", "tool_choice 'required' or a named function would work"),
    (CHAT | {"tool_choice": "required"}, "tool_choice", "needs tools"),
    (CHAT | {"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "would work"),
    (
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "names 'g', and tools has f",
    ),
    (
        CHAT | {"tools": [TOOL], "tool_choice": "required", "response_format": FORM},
        "response_format",
        "excludes a call that is required",
    ),
    (
        CHAT | {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "excludes calls of tools",
    ),
    (CHAT | {"functions": [{"name": "f"}]}, "functions", "tools would work"),
    (CHAT | {"function_call": "auto"}, "function_call", "tool_choice"),
    (CHAT | {"chat_template_kwargs": {"messages": []}}, "messages", "'messages' is not free"),
    (messages(content=None), "messages[0].content", "is required"),
    (
        messages(role="user", tool_calls=called()["messages"][0]["tool_calls"]),
        "messages[0].tool_calls",
        "role assistant",
    ),
    (messages(role="tool"), "messages[0].tool_call_id", "is required with the role tool"),
    (messages(tool_call_id="1"), "messages[0].tool_call_id", "belongs to no other"),
    (messages(function_call={"name": "f"}), "messages[0].function_call", "tool_calls in a message"),
    (called(arguments="["), "messages[0].tool_calls[0].function.arguments", "not the JSON of an object"),
    (called(arguments="[]"), "messages[0].tool_calls[0].function.arguments", "not the JSON of an object"),
    (called(arguments="[" * 5000), "messages[0].tool_calls[0].function.arguments", "not the JSON of an object"),
    (called(arguments='{"a": "\\ud800"}'), "messages[0].tool_calls[0].function.arguments", "not the JSON of an object"),
    (called(name=5), "messages[0].tool_calls[0].function.name", "valid string"),
]


@pytest.mark.parametrize(("body", "field", "sentence"), STRUCTURES)
def test_what_cannot_be_is_refused_by_field(served: Engine, body: dict[str, Any], field: str, sentence: str) -> None:
    check_refused(served, "/v1/chat/completions", body, field, sentence)


TOKENIZING: list[tuple[str, dict[str, Any], str, str]] = [
    ("/tokenize", {"prompt": "x" * 200_000}, "prompt", "characters"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages", "characters"),
    ("/tokenize", {}, "prompt", "or messages is needed"),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt", "not both"),
    ("/detokenize", {"tokens": [1] * 513}, "tokens", "at most 512 would work"),
    ("/detokenize", {"tokens": [49152]}, "tokens", "from 0 to 49151"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
]


@pytest.mark.parametrize(("path", "body", "field", "sentence"), TOKENIZING)
def test_what_is_too_long_to_tokenize_is_refused(
    served: Engine, path: str, body: dict[str, Any], field: str, sentence: str
) -> None:
    check_refused(served, path, body, field, sentence)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "JSON object"),
        (b"{", "not valid JSON"),
        (b'{"model": "small", "prompt": "a",}', "not valid JSON"),
        (b"[1, 2]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"null", "JSON object"),
        (b"\xff\xfe{}", "body"),
        (b"[" * 100_000, "body"),
        (b'{"model": "small", "prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"model": "small", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"model": "small", "prompt": "\\ud800"}', "prompt"),
        (b'{"model": "\\ud800", "prompt": "a"}', "model"),
    ],
)
def test_bodies_that_are_no_request_are_refused(served: Engine, content: bytes, sentence: str) -> None:
    with served.http as client:
        answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


def test_half_a_surrogate_pair_in_a_message_is_refused(served: Engine) -> None:
    content = b'{"model": "small", "messages": [{"role": "user", "content": "\\ud83d"}]}'
    with served.http as client:
        answer = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")


def test_another_model_path_or_method_is_refused(served: Engine) -> None:
    with served.http as client:
        other = client.post("/v1/completions", json=PLAIN | {"model": "gpt-4"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        assert client.get("/v1/nothing").json()["error"]["code"] == "not_found"
        unserved = client.post("/v1/embeddings", json={"model": NAME, "input": "hi"})
        assert unserved.status_code == 404
        assert "/v1/embeddings is not served here" in unserved.json()["error"]["message"]
        wrong = client.get("/v1/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"


def test_a_body_over_the_limit_is_refused_before_it_is_read(served: Engine) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_over_the_limit_without_announcement_is_refused(served: Engine) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    with served.http as client:
        try:
            answer = client.post("/v1/completions", content=chunks())
        except httpx.WriteError:  # the answer came, and the connection closed, while this side still wrote
            return
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_client_that_leaves_within_its_body_leaves_no_trace(served: Engine) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert served.get("/ready").status_code == 200


def test_a_full_queue_answers_503_with_retry_after(empty: Path) -> None:
    flags = ("--max-running-requests", "1", "--max-waiting-requests", "1")
    with engine(empty, *flags) as started, started.http as client:
        body = PLAIN | {"n": 2, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            parts = answer.iter_raw()  # kept: when it goes, httpx closes the connection
            next(parts)
            full = client.post("/v1/completions", json=PLAIN)
            assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
            assert full.headers["retry-after"] == "1"
            assert started.get("/ready").status_code == 200
        assert client.post("/v1/completions", json=PLAIN | {"n": 3}).status_code == 503


def test_an_api_key_guards_the_api_and_nothing_else(empty: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame\n")
    with engine(empty, "--api-key-file", str(tmp_path / "key")) as started, started.http as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
            answer = client.post("/v1/completions", json=PLAIN, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.get("/v1/models").status_code == 401
        assert started.openai("sesame").completions.create(model=NAME, prompt="hi").choices[0].text == "hi"
        for path in ("/health", "/ready", "/metrics", "/v1/speculation"):
            assert client.get(path).status_code == 200
