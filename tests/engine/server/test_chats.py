"""What a chat template is shown, what it may cost, and how calls of tools come back: against an engine that repeats its
prompt, with a template that says what to repeat.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load
from tests.engine.server.serving import MODEL, NAME, Engine, engine

# a prompt is repeated without special tokens: so a message's content is the answer, or all that the template sees
TEMPLATE = """\
{%- set task = messages[0].content -%}
{%- if task == 'loops' -%}
{%- for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor -%}
{%- elif task == 'range' %}{% for a in range(10**9) %}{% endfor -%}
{%- elif task == 'text' %}{{ ('x' * 10**11) | length -}}
{%- elif task == 'doubling' -%}
{%- set ns = namespace(x='x' * 1000) %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x -}}
{%- elif task == 'power' %}{{ 10**(10**10) -}}
{%- elif task == 'width' %}{{ '%100000000000d' % 1 -}}
{%- elif task == 'output' %}{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor -%}
{%- elif task == 'outside' %}{{ ''.__class__.__mro__[1].__subclasses__() -}}
{%- elif task == 'refuses' %}{{ raise_exception('roles must alternate') -}}
{%- elif task == 'show' %}{{ [messages, tools, enable_thinking] | tojson -}}
{%- else %}{{ messages[-1].content }}{% if tools and false %}<tool_call>{% endif -%}
{%- endif -%}
"""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time"}},
]


def write_model(folder: Path, template: str | None) -> Path:
    """SmolLM2's tokenizer with another template, or none."""
    folder.mkdir()
    load(resolve(MODEL)).backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("chats")
    model = write_model(folder / "model", TEMPLATE)
    (folder / "engine").mkdir()
    with engine(folder / "engine", "--max-model-len", "2048", model=str(model)) as started:
        yield started


def say(chats: Engine, content: str, **fields: Any) -> openai.types.chat.ChatCompletion:
    answer: openai.types.chat.ChatCompletion = chats.openai().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": content}], **fields
    )
    return answer


CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": ""}},
]


def test_a_template_sees_messages_tools_and_variables_as_the_reference_library_gives_them(chats: Engine) -> None:
    messages: Any = [
        {"role": "developer", "content": "show"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Bo"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "reasoning_content": "hm"},
    ]
    shown: list[Any] = [
        {"role": "system", "content": "show"},
        {"role": "user", "content": "ab", "name": "Bo"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                CALLS[0] | {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}},
                CALLS[1] | {"function": {"name": "get_time", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm"},
    ]
    client = chats.openai().chat.completions
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.create(model=NAME, messages=messages, tools=TOOLS, max_tokens=999, extra_body=extra)
    assert json.loads(answer.choices[0].message.content or "") == [shown, TOOLS, False]
    hidden = client.create(
        model=NAME, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=999, extra_body=extra
    )
    assert json.loads(hidden.choices[0].message.content or "")[1] is None
    with chats.http as http:
        body = {"messages": messages, "tools": TOOLS, **extra}
        counted = http.post("/tokenize", json=body).json()
    assert answer.usage is not None
    assert counted["count"] == answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("loops", "more time or memory"),
        ("range", "Range too big"),
        ("text", "more time or memory"),
        ("doubling", "more time or memory"),
        ("power", "more time or memory"),
        ("width", "more time or memory"),
        ("output", "endless prompt"),
        ("outside", "unsafe"),
        ("refuses", "roles must alternate"),
    ],
)
def test_a_template_that_takes_or_wants_too_much_is_ended_and_the_next_chat_is_served(
    chats: Engine, task: str, sentence: str
) -> None:
    with chats.http as http:
        answer = http.post(
            "/v1/chat/completions", json={"model": NAME, "messages": [{"role": "user", "content": task}]}, timeout=120
        )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages"), error
    assert sentence in error["message"]
    assert say(chats, "hello").choices[0].message.content == "hello"


def test_others_are_served_while_a_template_runs_into_its_bound(chats: Engine) -> None:
    with pytest.raises(openai.APITimeoutError):
        say(chats, "loops", timeout=0.2)
    assert chats.openai().completions.create(model=NAME, prompt="hi").choices[0].text == "hi"
    assert chats.get("/ready").status_code == 200
    assert say(chats, "hello", timeout=120).choices[0].message.content == "hello"


def test_a_process_for_templates_that_is_killed_is_started_again(chats: Engine) -> None:
    say(chats, "hello")
    (renderer,) = chats.text_pids()
    os.kill(renderer, signal.SIGKILL)
    assert say(chats, "hello again").choices[0].message.content == "hello again"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_calls_come_back_as_calls_whole_and_streamed(chats: Engine) -> None:
    text = "Let me see.\n" + call("get_weather", '{"city": "Zürich 🤷"}') + "\n" + call("get_time", "{}")
    expected = [("get_weather", '{"city": "Zürich 🤷"}'), ("get_time", "{}")]
    answer = say(chats, text, tools=TOOLS, max_tokens=999, logprobs=None)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    found = choice.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in found if c.type == "function"] == expected
    assert len({c.id for c in found}) == 2
    # the official client's own accumulation
    with chats.openai().chat.completions.stream(
        model=NAME, messages=[{"role": "user", "content": text}], tools=TOOLS, max_tokens=999
    ) as stream:
        parts = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
        message = stream.get_final_completion().choices[0].message
    assert parts > 3  # arguments are told as they come
    assert message.content == "Let me see."
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or []] == expected
    one = say(chats, text, tools=TOOLS, max_tokens=999, parallel_tool_calls=False)
    assert [c.id[:5] for c in one.choices[0].message.tool_calls or []] == ["call_"]


def test_what_a_tool_says_is_content_where_no_call_is_possible(chats: Engine) -> None:
    text = call("get_time", "{}")
    assert say(chats, text, max_tokens=99).choices[0].message.content == text
    answer = say(chats, text, max_tokens=99, tools=TOOLS, tool_choice="none").choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (text, None, "stop")


def test_a_call_that_is_cut_short_ends_for_its_length(chats: Engine) -> None:
    text = call("get_weather", '{"city": "a city with a rather long name"}')
    choice = say(chats, text, tools=TOOLS, max_tokens=22).choices[0]
    assert choice.finish_reason == "length"
    (cut,) = choice.message.tool_calls or []
    assert cut.type == "function"
    assert '{"city": "a city with a rather long name"}'.startswith(cut.function.arguments)
    assert cut.function.arguments.startswith('{"city"')


def test_without_a_template_chats_are_refused_and_completions_served(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    with engine(tmp_path / "engine", model=str(write_model(tmp_path / "model", None))) as started:
        with pytest.raises(openai.BadRequestError, match="no chat template; /v1/completions would work"):
            say(started, "hi")
        assert started.openai().completions.create(model=NAME, prompt="hi").choices[0].text == "hi"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}",
        "{% if %}",
        "{% if a %}" * 3000,
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% autoescape 10**(10**10) %}{% endautoescape %}",
    ],
    ids=["unclosed", "empty", "deep", "nested", "autoescape"],
)
def test_a_broken_template_is_refused_when_it_is_loaded(tmp_path: Path, template: str) -> None:
    with pytest.raises(CheckpointError, match="chat template is not valid Jinja"):
        load(write_model(tmp_path / "model", template))


def test_a_template_s_constants_are_not_evaluated_when_it_is_loaded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "{{ 10**(10**10) }}{% if 10**(10**10) %}{% endif %}{% set a = 10**10**9 %}")
    assert load(model).chat_template is not None
