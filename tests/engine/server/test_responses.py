"""/v1/responses: what its requests become, and that its answers are the chat's, told in OpenAI's items and events."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pilotfish_engine.server.responses.items import sealed
from tests.engine.server.serving import NAME, Engine, engine
from tests.engine.server.small_core import Behaviour
from tests.engine.server.test_chats import PARAMETERS, TEMPLATE, TOOLS, call, write_model
from tests.engine.server.told import both, events, heard, post, read, text_of, whole

NO_THINKING: Any = {"chat_template_kwargs": {"enable_thinking": False}}
FUNCTIONS: Any = [tool["function"] | {"type": "function"} for tool in TOOLS]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Repeats the last message, or after "show" what its template sees."""
    folder = tmp_path_factory.mktemp("responses")
    model = write_model(folder / "model", TEMPLATE)
    (folder / "engine").mkdir()
    with engine(folder / "engine", "--max-model-len", "2048", model=str(model)) as started:
        yield started


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
SECOND = {"type": "function_call", "call_id": "call_2", "name": "get_time", "arguments": ""}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "sun"}
CHAT_CALLS = [
    {"id": each["call_id"], "type": "function", "function": {"name": each["name"], "arguments": each["arguments"]}}
    for each in (CALL, SECOND)
]
# what the two APIs say alike
ALIKE: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"input": "show"}, [said("user", "show")]),
    ({"input": "hi", "instructions": "show"}, [said("system", "show"), said("user", "hi")]),
    (
        {"input": [said("developer", "show"), said("system", "b", type="message"), said("user", "c", status=None)]},
        [said("system", "show"), said("system", "b"), said("user", "c")],
    ),
    (
        {
            "input": [
                said("user", "show"),
                said("assistant", [{"type": "output_text", "text": "a", "annotations": []}], id="msg_1"),
                said("user", [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]),
                said("assistant", [{"type": "refusal", "refusal": "no"}], phase="final_answer"),
                said("user", ""),
            ]
        },
        [said("user", "show"), said("assistant", "a"), said("user", "bc"), said("assistant", "no"), said("user", "")],
    ),
    (
        {
            "input": [
                said("user", "show"),
                said("assistant", "let me see"),
                CALL | {"id": "fc_1", "status": "completed", "parsed_arguments": None},
                SECOND,
                OUTPUT,
                {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "9"}]},
                CALL,
                OUTPUT,
                said("assistant", "it is sunny"),
                said("assistant", "and nine"),
                said("user", "thanks"),
            ],
        },
        [
            said("user", "show"),
            said("assistant", "let me see", tool_calls=CHAT_CALLS),
            said("tool", "sun", tool_call_id="call_1"),
            said("tool", "9", tool_call_id="call_2"),
            said("assistant", None, tool_calls=CHAT_CALLS[:1]),
            said("tool", "sun", tool_call_id="call_1"),
            said("assistant", "it is sunny"),
            said("assistant", "and nine"),
            said("user", "thanks"),
        ],
    ),
]
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed"}
ALIKE += [
    (
        {
            "input": [
                said("user", "show"),
                THOUGHT | {"content": [{"type": "reasoning_text", "text": text} for text in ("sun", "?")]},
                said("assistant", "let me see"),
                CALL,
                OUTPUT,
                THOUGHT | {"content": [], "encrypted_content": sealed("so be it")},
                CALL,
                OUTPUT,
                THOUGHT | {"summary": [{"type": "summary_text", "text": "done"}], "encrypted_content": "gAAAAB"},
                said("assistant", "sunny"),
                THOUGHT | {"encrypted_content": "gAAAAB"},
                said("user", "thanks"),
            ]
        },
        [
            said("user", "show"),
            said("assistant", "let me see", tool_calls=CHAT_CALLS[:1], reasoning_content="sun?"),
            said("tool", "sun", tool_call_id="call_1"),
            said("assistant", None, tool_calls=CHAT_CALLS[:1], reasoning_content="so be it"),
            said("tool", "sun", tool_call_id="call_1"),
            said("assistant", "sunny", reasoning_content="done"),
            said("user", "thanks"),
        ],
    )
]  # fmt: skip


@pytest.mark.parametrize(("fields", "messages"), ALIKE)
def test_a_conversation_is_the_chat_s(shown: Engine, fields: Any, messages: Any) -> None:
    """The engine's answer is all that the template sees."""
    chat = shown.openai().chat.completions.create(
        model=NAME, messages=messages, tools=TOOLS, max_tokens=999, extra_body=NO_THINKING
    )
    answer = both(shown, **fields, tools=FUNCTIONS, max_output_tokens=999, **NO_THINKING)
    assert json.loads(text_of(answer)) == json.loads(chat.choices[0].message.content or "")
    assert chat.usage is not None
    assert answer["usage"]["input_tokens"] == chat.usage.prompt_tokens
    assert answer["usage"]["output_tokens"] == chat.usage.completion_tokens


def test_a_response_says_what_was_asked_and_what_held_otherwise(shown: Engine) -> None:
    plain = whole(shown, input="hi")
    held = {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [], "store": False, "metadata": {}}
    assert plain | held == plain
    assert plain["text"]["format"] == {"type": "text"}
    form = {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    asked: dict[str, Any] = {
        "input": "hi",
        "instructions": "be brief",
        "temperature": 0.5,
        "top_p": 0.25,
        "presence_penalty": 0.5,
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "tools": [FUNCTIONS[0] | {"strict": True}],
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "top_logprobs": 2,
    }
    answer = whole(
        shown, **asked, store=True, background=False, previous_response_id=None, service_tier="auto", truncation="auto",
        include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "medium"}, stream_options=None, conversation=None, prompt=None,
    )  # fmt: skip
    assert {key: answer[key] for key in asked if key != "input"} == {k: v for k, v in asked.items() if k != "input"}
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    other = whole(shown, input="hi", tools=FUNCTIONS, tool_choice=choice, text={"format": {"type": "text"}})
    assert other["tool_choice"] == choice
    assert whole(shown, input="hi", text={"format": form}, max_output_tokens=3)["text"]["format"] == form


def test_an_answer_cut_short_is_incomplete(shown: Engine) -> None:
    answer = both(shown, input="one two three four five six", max_output_tokens=4)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (message,) = answer["output"]
    assert (message["status"], answer["completed_at"], answer["usage"]["output_tokens"]) == ("incomplete", None, 4)
    assert text_of(answer) == "one two three four"
    nothing = both(shown, input="hi", stop="hi")
    assert [part["text"] for item in nothing["output"] for part in item["content"]] == [""]
    assert nothing["status"] == "completed"


def test_calls_are_items_between_the_messages(shown: Engine) -> None:
    rome, time = call("get_weather", '{"city": "Zürich 🤷"}'), call("get_time", "{}")
    text = f"Let me see.\n{rome}\nAnd now:\n{time}{time}"
    answer = both(shown, input=text, tools=FUNCTIONS)
    told = [(i["type"], i.get("name"), i.get("arguments"), i.get("content")) for i in answer["output"]]
    assert [kind for kind, *_ in told] == ["message", "function_call", "message", "function_call", "function_call"]
    assert [t[1:3] for t in told if t[1]] == [("get_weather", '{"city": "Zürich 🤷"}')] + [("get_time", "{}")] * 2
    assert [text_of({"output": [i]}).strip() for i in answer["output"] if i["type"] == "message"] == [
        "Let me see.",
        "And now:",
    ]
    assert len({item["call_id"] for item in answer["output"] if "call_id" in item}) == 3
    alone = both(shown, input=rome, tools=FUNCTIONS, parallel_tool_calls=False)
    assert [item["type"] for item in alone["output"]] == ["function_call"]
    cut = both(shown, input=rome, tools=FUNCTIONS, max_output_tokens=20)
    assert (cut["status"], [item["status"] for item in cut["output"]]) == ("incomplete", ["incomplete"])
    hidden = both(shown, input=rome, tools=FUNCTIONS, tool_choice="none")
    assert text_of(hidden) == rome


def test_deltas_can_be_filled_up_to_tell_nothing_by_their_size(shown: Engine) -> None:
    told = events(shown, input="one three nineteen", stream_options={"include_obfuscation": True})
    sizes = {len(json.dumps(event)) - len(str(event["sequence_number"])) for event in told if "delta" in event}
    assert len(sizes) == 1
    assert "obfuscation" not in events(shown, input="one")[4]


def test_tools_that_are_not_allowed_are_not_shown(shown: Engine) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    answer = whole(shown, input="show", tools=FUNCTIONS, tool_choice=choice, max_output_tokens=999, **NO_THINKING)
    assert json.loads(text_of(answer))[1] == TOOLS[1:]


def test_the_effort_reaches_the_template(shown: Engine) -> None:
    none = whole(shown, input="show", reasoning={"effort": "none"})
    assert json.loads(text_of(none))[2] is False


def test_the_official_client_streams_parses_and_goes_on(shown: Engine) -> None:
    client = shown.openai().responses
    with client.stream(model=NAME, input="hello there") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(deltas) == "hello there"
    history: Any = [{"role": "user", "content": "show"}, *final.output, {"role": "user", "content": "and?"}]
    shows = client.create(model=NAME, input=history, max_output_tokens=999, extra_body=NO_THINKING)
    assert [message["content"] for message in json.loads(shows.output_text)[0]] == ["show", "hello there", "and?"]
    with client.stream(model=NAME, input=call("get_weather", '{"city": "Rome"}'), tools=FUNCTIONS) as stream:
        calls = list(stream.get_final_response().output)
    history = [{"role": "user", "content": "show"}, *calls, OUTPUT | {"call_id": calls[0].call_id}]  # type: ignore[union-attr]
    shows = client.create(model=NAME, input=history, max_output_tokens=999, extra_body=NO_THINKING)
    assert [message["role"] for message in json.loads(shows.output_text)[0]] == ["user", "assistant", "tool"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "valid list"),
    ({"input": []}, "input", "at least 1"),
    ({"input": 7}, "input", "valid list"),
    ({"input": ["hi"]}, "input[0]", "valid dictionary"),
    ({"input": "hi\ud800"}, "input[0].content", "surrogate"),
    ({"input": [said("tool", "x")]}, "input[0].role", "'user'"),
    ({"input": [{"content": "x"}]}, "input[0].role", "is required"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
    ({"input": [said("user", "a"), said("user", [{"type": "input_image"}])]}, "input[1].content", "input_text"),
    ({"input": [said("user", [{"type": "input_text"}])]}, "input[0].content", "without its text"),
    ({"input": [said("user", [7])]}, "input[0].content", "input_text"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "no item is stored"),
    ({"input": [{"id": "msg_1"}]}, "input[0].type", "no item is stored"),
    ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type", "function_call_output"),
    ({"input": [{"type": ["message"]}]}, "input[0].type", "'message'"),
    ({"input": [{k: v for k, v in CALL.items() if k != "name"}]}, "input[0].name", "is required"),
    ({"input": [CALL | {"arguments": "[1]"}]}, "input[0].arguments", "'{}' would work"),
    ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments", "valid string"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "is required"),
    ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input", "a message would work"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0].summary", "summary_text"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "no response is stored"),
    ({"conversation": "conv_1"}, "conversation", "no response is stored"),
    ({"background": True}, "background", "stream: true would work"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "instructions would work"),
    ({"messages": [said("user", "hi")]}, "messages", "input would work"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens would work"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text.format would work"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"include": ["x"]}, "include[0]", "'message.output_text.logprobs'"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "is required"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "'standard'"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function' would work"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "'function' would work"),
    ({"tools": [FUNCTIONS[0], {"type": "mcp", "server_label": "s"}]}, "tools[1].type", "'function' would work"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "is required"),
    ({"tools": [FUNCTIONS[0] | {"defer_loading": True}]}, "tools[0].defer_loading", "False"),
    ({"tools": [FUNCTIONS[0]] * 2}, "tools", "two functions named 'get_weather'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "names 'f'"),
    ({"tools": FUNCTIONS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice", "'allowed_tools'"),
    (
        {"tools": FUNCTIONS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "f"}]}},
        "tool_choice", "names 'f'",
    ),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "needs stream: true"),
    ({"input": "hi " * 2100}, "input", "maximum context length is 2048"),
    ({"input": [said("user", "refuses")]}, "input", "roles must alternate"),
    ({"structured_outputs": {"regex": "a"}, "tools": FUNCTIONS}, "structured_outputs", "excludes"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "sentence"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_by_its_path(
    shown: Engine, fields: dict[str, Any], param: str, sentence: str, stream: bool
) -> None:
    if stream and "stream_options" in fields:
        return
    answer = post(shown, **{"input": "hi", "stream": stream} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert sentence in error["message"]
    assert error["message"].startswith(param)


def test_nothing_is_stored_and_the_answer_to_who_asks_for_it_says_so(shown: Engine) -> None:
    client = shown.openai().responses
    told = client.create(model=NAME, input="hi", store=True)
    for ask in (client.retrieve, client.delete, client.cancel, client.input_items.list):
        with pytest.raises(openai.NotFoundError, match="no response is stored"):
            ask(told.id)


def test_a_fault_within_a_stream_is_an_error_and_a_response_that_failed(empty: Path) -> None:
    body = {"model": NAME, "input": "x", "ignore_eos": True, "stream": True}
    with engine(empty, "--max-model-len", "200000", behaviour=Behaviour(step_seconds=0.01)) as started:
        text, core = "", started.core_pid()
        with started.http as client, client.stream("POST", "/v1/responses", json=body) as answer:
            for part in answer.iter_text():
                if not text:
                    os.kill(core, signal.SIGKILL)
                text += part
    told = read(text)
    error, failed = told[-2:]
    assert (error["type"], error["code"], failed["type"]) == ("error", "engine_gone", "response.failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert "killed by SIGKILL" in error["message"]
    assert heard(told)["status"] == "failed"


def test_reasoning_is_an_item_before_the_answer_and_goes_back(empty: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", TEMPLATE + "{# <think> </think> #}")
    with engine(empty, "--max-model-len", "2048", model=str(model)) as started:
        asked: Any = {"input": "<think>\nlet me see\n</think>\n\nIt is."}
        answer = both(started, **asked, include=["reasoning.encrypted_content"])
        thought, message = answer["output"]
        assert (thought["type"], text_of({"output": [message]})) == ("reasoning", "It is.")
        assert thought["content"] == [{"type": "reasoning_text", "text": "let me see"}]
        assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < answer["usage"]["output_tokens"]
        cut = both(started, input="<think>\nlet me see and see", max_output_tokens=5)
        assert [item["status"] for item in cut["output"]] == ["incomplete"]
        alone = both(started, input="<think>\nlet me see\n</think>")
        assert [item["type"] for item in alone["output"]] == ["reasoning", "message"]
        for left_out in ("content", "encrypted_content"):
            handed = {key: value for key, value in thought.items() if key != left_out}
            history = [said("user", "show"), handed, message, said("user", "and?")]
            shown = text_of(whole(started, input=history, max_output_tokens=999, **NO_THINKING))
            assert json.loads(shown)[0][1]["reasoning_content"] == "let me see"
