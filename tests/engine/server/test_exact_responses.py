"""/v1/responses against a model: for every parameter the chat's answer, whole and streamed, and no part of an answer
depends on how it was cut.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.generation import Piece
from pilotfish_engine.server.parts import CallPart, Content, Reasoning
from pilotfish_engine.server.responses.items import opened, sealed
from pilotfish_engine.server.responses.output import Output
from pilotfish_engine.server.tool_calls import Calls
from pilotfish_engine.server.tool_formats import BY_NAME
from tests.engine.server import letters
from tests.engine.server.parameters import CHATS, MAX_TOKENS, MESSAGES, SCHEMA
from tests.engine.server.serving import NAME, Engine
from tests.engine.server.told import ANEW, EVENTS, both, heard, known_only, post, same, text_of

Json = dict[str, Any]


@pytest.fixture(scope="module")
def letter_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("responses")
    with letters.serving(folder, letters.model(letters.tokenizer().get_vocab_size())) as engine:
        yield engine


def flat(named: Any) -> Any:
    """A function as this API writes it: what it is stands beside its type."""
    return {"type": "function"} | named["function"] if isinstance(named, dict) else named


def as_response(chat: Json) -> Json:
    """A chat's fields as those of a response."""
    fields: Json = {"max_tokens": MAX_TOKENS} | chat
    fields["max_output_tokens"] = fields.pop("max_tokens")
    if (form := fields.pop("response_format", None)) is not None:
        fields["text"] = {"format": {"type": form["type"]} | form.get("json_schema", {})}
    if "tools" in fields:
        fields["tools"] = [flat(tool) for tool in fields["tools"]]
        fields["tool_choice"] = flat(fields.get("tool_choice"))
    if fields.pop("logprobs", False):
        fields["include"] = ["message.output_text.logprobs"]
    return fields


TRIED = (
    "greedy", "seed", "top_p", "frequency_penalty", "logit_bias", "stop", "json_object", "strict", "regex", "logprobs",
    "logprobs alone", "one call", "named", "cut short", "auto", "auto or form", "none",
)  # fmt: skip


@pytest.mark.parametrize("name", TRIED)
def test_every_parameter_means_what_it_means_in_a_chat(letter_model: Engine, name: str) -> None:
    answer = both(letter_model, input=MESSAGES, **as_response(CHATS[name]))
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": MAX_TOKENS} | CHATS[name]
    with letter_model.http as client:
        chat = client.post("/v1/chat/completions", json=body).json()
    choice, usage = chat["choices"][0], chat["usage"]
    calls = [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in _calls(choice)]
    assert (text_of(answer), calls) == (choice["message"]["content"] or "", expected)
    assert answer["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == usage["completion_tokens"]
    assert answer["usage"]["total_tokens"] == usage["total_tokens"]
    assert (answer["status"] == "incomplete") == (choice["finish_reason"] == "length")
    if choice["logprobs"] is not None and not calls:
        (message,) = answer["output"]
        scored = message["content"][0]["logprobs"]
        assert [(each["token"], each["bytes"]) for each in scored] == [
            (each["token"], each["bytes"] or []) for each in choice["logprobs"]["content"]
        ]
        for ours, theirs in zip(scored, choice["logprobs"]["content"], strict=True):
            assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)


def _calls(choice: Json) -> list[Json]:
    calls: list[Json] = choice["message"].get("tool_calls") or []
    return calls


class Person(BaseModel):
    name: Literal["Bo", "Al"]
    age: Literal[7, 8]


def test_the_official_client_parses_texts_and_arguments(letter_model: Engine) -> None:
    client = letter_model.openai().responses
    parsed = client.parse(model=NAME, input="who?", text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    tool: Any = openai.pydantic_function_tool(Person, name="found")
    function = {"type": "function", **tool["function"]}
    asked: Any = {
        "model": NAME,
        "input": "who?",
        "tools": [function],
        "tool_choice": {"type": "function", "name": "found"},
    }
    form: Any = {
        "format": {"type": "json_schema", "name": "found", "schema": Person.model_json_schema(), "strict": True}
    }
    with client.stream(text=form, **asked) as stream:  # a form beside a call that is required, as instructor sends it
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert Person.model_validate_json(call.arguments)
    # what was parsed goes back as it is
    history: Any = [{"role": "user", "content": "who?"}, *parsed.output, call.model_dump()]
    assert client.create(model=NAME, input=history, max_output_tokens=3).status == "incomplete"


def test_a_form_and_tools_that_may_be_called(letter_model: Engine) -> None:
    form = {"type": "json_schema", "name": "p", "schema": SCHEMA}
    tools = [{"type": "function", "name": "wait"}]
    kinds = set()
    for seed in range(3):
        answer = both(letter_model, input="a", text={"format": form}, tools=tools, seed=seed, max_output_tokens=60)
        for item in answer["output"]:
            kinds.add(item["type"])
            if item["type"] == "message" and answer["status"] == "completed":
                json.loads(text_of(answer))
    assert "message" in kinds


REFERENCE = "text.format.schema.$ref"  # what is read before it is compiled is named by its place


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "no"}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#/x"}}}}, REFERENCE),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": 5}}], "tool_choice": "required"}, "tools"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_the_stream(
    letter_model: Engine, fields: Json, param: str, stream: bool
) -> None:
    answer = post(letter_model, input="hi", stream=stream, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(param)


ROME, TIME = '{"city": "R}o<m\\"e"}', "{}"
TEXTS = [
    "just text, <tool and {}",
    "a <tool_call>\n{\"name\": \"f\", \"arguments\": " + ROME + "}\n</tool_call> b {} <tool_call>{\"name\": \"g\", "
    "\"arguments\": {}}</tool_call><tool_call>{\"arguments\": {}, \"name\": \"g\"}</tool_call>\nc",
    '{"name": "f", "parameters": ' + ROME + '}; {"name": "g", "parameters": {}} and more {"name"',
]  # fmt: skip


def output(style: str, parts: list[str]) -> tuple[list[Json], list[Json]]:
    calls = Calls(BY_NAME[style], [Function(name="f"), Function(name="g")], required=False, several=True)
    reader, made = calls.reader(), Output(None)
    told: list[Json] = []
    for number, part in enumerate(parts, 1):
        last = number == len(parts)
        piece = Piece(0, part, reader.feed(part, last), "stop" if last else None)
        told += json.loads(json.dumps(list(made.feed(piece))))
    return made.items, told


@given(st.sampled_from(TEXTS), st.sampled_from(["hermes", "json"]), st.data())
@settings(max_examples=200, deadline=None)
def test_items_do_not_depend_on_how_an_answer_is_cut(text: str, style: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    parts = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    items, told = output(style, parts)
    assert same(items) == same(output(style, [text])[0]) == same(output(style, list(text))[0])
    hear(items, told)
    assert {key for item in items for key in item} - ANEW <= {"type", "status", "role", "content", "name", "arguments"}


def hear(items: list[Json], told: list[Json]) -> None:
    """Raises AssertionError when these events do not add up to the items."""
    response: Json = {"status": "in_progress", "output": [], "usage": None}
    framed: list[Json] = [
        {"type": "response.created", "response": response},
        {"type": "response.in_progress", "response": response},
        *told,
        {"type": "response.completed", "response": {"status": "completed", "output": items, "usage": None}},
    ]
    heard([event | {"sequence_number": number} for number, event in enumerate(framed)])
    for event in told:
        known_only(EVENTS.validate_json(json.dumps(event | {"sequence_number": 0}), strict=True))


TEXT = st.text("ab \n", min_size=1, max_size=3)
SPOKEN: st.SearchStrategy[list[Any]] = st.lists(
    st.one_of(st.builds(Reasoning, TEXT), st.builds(Content, TEXT), st.builds(list, st.lists(TEXT, max_size=2))),
    max_size=6,
)


@given(SPOKEN, st.booleans())
@settings(max_examples=50, deadline=None)
def test_reasoning_messages_and_calls_are_items_in_their_order(spoken: list[Any], seals: bool) -> None:
    """A list stands for a call with its arguments' parts."""
    made = Output(None, seals)
    told: list[Json] = []
    expected: list[tuple[str, str]] = []
    calls = 0
    for part in spoken:
        if isinstance(part, list):
            begun = [CallPart(calls, "f", "", f"id_{calls}"), *(CallPart(calls, None, text) for text in part)]
            expected.append(("function_call", "".join(part)))
            calls += 1
        else:
            begun = [part]
            kind = "message" if isinstance(part, Content) else "reasoning"
            before = expected.pop()[1] if expected and expected[-1][0] == kind else ""
            expected.append((kind, before + part.text))
        for each in begun:
            told += json.loads(json.dumps(list(made.feed(Piece(0, "", [each], None)))))
    told += json.loads(json.dumps(list(made.feed(Piece(0, "", [], "stop")))))
    if not expected or expected[-1][0] == "reasoning":
        expected.append(("message", ""))
    assert [(item["type"], _text(item)) for item in made.items] == expected
    for item in made.items:
        if item["type"] == "reasoning":
            assert opened(item.get("encrypted_content", "")) == (_text(item) if seals else None)
    assert [item["call_id"] for item in made.items if "call_id" in item] == [f"id_{call}" for call in range(calls)]
    hear(made.items, told)


def _text(item: Json) -> str:
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


@given(st.text(), st.text("abcdABCD0123+/=", max_size=9))
def test_only_what_was_sealed_here_is_opened(text: str, foreign: str) -> None:
    assert opened(sealed(text)) == text
    assert opened(foreign) is None
    assert opened(sealed(text) + "*") is None
