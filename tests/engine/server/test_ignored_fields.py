"""Fields that nobody knows: never part of what is done, always named, and never a way into a header or a label."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from pilotfish_engine.server.bodies import ChatRequest, CompletionRequest
from pilotfish_engine.server.body import Body, header
from pilotfish_engine.server.responses.request import ResponsesRequest
from tests.engine.server.parameters import CHATS, COMPLETIONS, MESSAGES, PROMPT
from tests.engine.server.serving import NAME, Engine

Path = tuple[str | int, ...]
NAMES = ("x", "temprature", "Model", "parsed", "self", "model_fields", "schema_", "json_", "_ignored", "__class__",
         "unserved", "", "\0", "a, b", "a\r\nb", "é", "\ud800", "m" * 10_000, "alternatives", "[0]", "a.b")  # fmt: skip
VALUES: tuple[Any, ...] = (None, True, 7, 0.5, "x", "\ud800", [], [[1]], {}, {"type": "x", "": {"a": None}})
FREE = ("logit_bias", "chat_template_kwargs", "parameters", "schema", "json", "metadata", "arguments")
CONVERSATION = [
    {"role": "system", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]},
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "wait", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": "done"},
]  # fmt: skip
ITEMS = [
    {"role": "user", "content": "x"},
    {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}, {"type": "refusal", "refusal": "no"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "b"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}], "encrypted_content": "g"},
    {"type": "function_call", "call_id": "c", "name": "wait", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "d"}]},
]  # fmt: skip
TOOL = {"type": "function", "name": "wait", "parameters": {"type": "object"}}
BODIES: list[tuple[type[Body], dict[str, Any]]] = [
    *((ChatRequest, {"model": NAME, "messages": CONVERSATION} | body) for body in CHATS.values()),
    *((CompletionRequest, {"model": NAME, "prompt": PROMPT} | body) for body in COMPLETIONS.values()),
    (ChatRequest, {"model": NAME, "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}),
    (ResponsesRequest, {"model": NAME, "input": ITEMS, "reasoning": {"effort": "low"}, "tools": [TOOL]}),
    (ResponsesRequest, {"model": NAME, "input": "x", "text": {"format": {"type": "json_schema", "name": "a",
        "schema": {"type": "object"}}}}),
]


def strewn(value: Any, chance: random.Random, path: Path = ()) -> tuple[Any, set[Path]]:
    """The value with fields that nobody knows in its objects, and the paths of these."""
    if isinstance(value, list):
        found = [strewn(part, chance, (*path, index)) for index, part in enumerate(value)]
        return [part for part, _ in found], {name for _, names in found for name in names}
    if not isinstance(value, dict):
        return value, set()
    made: dict[str, Any] = {}
    paths: set[Path] = set()
    for name in value:
        if name in FREE:
            made[name] = value[name]
        else:
            made[name], inner = strewn(value[name], chance, (*path, name))
            paths |= inner
    for name in chance.sample(NAMES, chance.choice((0, 0, 1, 3))):
        made[name] = chance.choice(VALUES)
        paths.add((*path, name))
    return dict(chance.sample(list(made.items()), len(made))), paths


@pytest.mark.parametrize("seed", range(5))
def test_fields_that_nobody_knows_change_nothing_and_are_all_named(seed: int) -> None:
    chance = random.Random(seed)
    for kind, plain in BODIES:
        body, paths = strewn(plain, chance)
        meant, read = kind.model_validate(plain), kind.model_validate(body)
        assert read.model_dump(warnings=False) == meant.model_dump(warnings=False)
        assert set(read.ignored()) == paths
        assert list(meant.ignored()) == []
        if isinstance(read, ChatRequest) and isinstance(meant, ChatRequest):
            assert [m.for_template() for m in read.messages] == [m.for_template() for m in meant.messages]
            assert [t.for_template() for t in read.tools or []] == [t.for_template() for t in meant.tools or []]
        if isinstance(read, ResponsesRequest) and isinstance(meant, ResponsesRequest):
            assert read.as_chat() == meant.as_chat()


def test_a_header_holds_no_more_than_it_should_whatever_the_names_are() -> None:
    chance = random.Random(7)
    for _ in range(300):
        count = chance.choice((1, 5, 4000))
        paths = [("messages", chance.randrange(4096), chance.choice(NAMES)) for _ in range(count)]
        text = header(paths)
        assert re.fullmatch(r"[\x21-\x7e]+(, [\x21-\x7e]+)*(, \+\d+ more)?", text)
        assert len(text) <= 1020
        shown, _, left = text.partition(", +")
        assert shown.count(", ") + 1 + int((left or "0 more").removesuffix(" more")) == count


def test_answers_name_what_they_ignored_and_a_counter_counts_it_without_clients_words(served: Engine) -> None:
    before = served.metric("pilotfish_engine_ignored_fields_total")
    body = {"model": NAME, "prompt": "a b", "temprature": 1, "store": True, "a\r\nb": {"c": 1}}
    chat: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}],
        "tools": [{"type": "function", "function": {"name": "wait", "returns": "x"}}],
        "tool_choice": "none",
    }
    with served.http as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == "a b"
        assert answer.headers["x-ignored-fields"] == "temprature, store, a%0D%0Ab"
        streamed = client.post("/v1/chat/completions", json=chat | {"stream": True, "stream_options": {"usage": 1}})
        assert set(streamed.headers["x-ignored-fields"].split(", ")) == {
            "stream_options.usage", "messages[0].content[0].cache_control", "tools[0].function.returns",
        }  # fmt: skip
        refused = client.post("/v1/completions", json=body | {"model": "another"})
        assert (refused.status_code, refused.headers["x-ignored-fields"]) == (404, "temprature, store, a%0D%0Ab")
        sent: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [40]}),
        )
        for path, what in sent:
            assert client.post(path, json=what | {"y": 1}).headers["x-ignored-fields"] == "y"
        plain = client.post("/v1/completions", json={"model": NAME, "prompt": "a", "store": False, "suffix": None})
        assert "x-ignored-fields" not in plain.headers
    assert served.metric("pilotfish_engine_ignored_fields_total") == before + 11
    labels = re.findall(r'ignored_fields_total\{field="(.*?)"\}', served.get("/metrics").text)
    assert {"store", "cache_control", "other"} <= set(labels)
    assert "temprature" not in labels


def test_an_answers_message_goes_back_with_all_that_an_sdk_made_of_it(served: Engine) -> None:
    call = {"index": 0, "id": "c", "type": "function",
            "function": {"name": "wait", "arguments": "{}", "parsed_arguments": {}}}  # fmt: skip
    made: dict[str, Any] = {
            "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "parsed": None,
            "function_call": None, "tool_calls": [call], "provider_specific_fields": {}}  # fmt: skip
    refusal = ChatCompletionMessage(role="assistant", content=None, refusal="no").model_dump()
    history = [*MESSAGES, made, {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "done"}]}]
    said = [{"role": "developer", "name": "me", "content": "x"}, *MESSAGES, refusal]
    with served.http as client:
        for messages in (history, said):
            body = json.dumps({"model": NAME, "messages": messages, "max_tokens": 5})
            answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text
        whole = client.post("/v1/chat/completions", json={"model": NAME, "messages": said, "max_tokens": 400})
        assert "no" in whole.json()["choices"][0]["message"]["content"]


def test_usage_can_be_told_in_every_chunk(served: Engine) -> None:
    body = {"model": NAME, "prompt": "a b c d e", "n": 2, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    with served.http as client:
        whole = client.post("/v1/completions", json={key: body[key] for key in ("model", "prompt", "n")}).json()
        told = client.post("/v1/completions", json=body | {"stream_options": options}).text
    chunks = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert chunks[-1]["usage"] == whole["usage"]
    assert 0 < counts[0] < counts[-1]


def test_chunks_can_be_filled_up_to_tell_nothing_by_their_size(served: Engine) -> None:
    body = {"model": NAME, "messages": MESSAGES, "stream": True, "stream_options": {"include_obfuscation": True}}
    with served.http as client:
        told = client.post("/v1/chat/completions", json=body).text
    sizes = {len(line) - 6 for line in told.splitlines() if line.startswith("data: {")}
    assert len(sizes) == 1
