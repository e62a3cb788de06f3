"""Reasoning over HTTP: whole and streamed, by either API, of models that repeat what they are told and of one that
decodes by a grammar behind its reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load
from tests.engine.server import letters
from tests.engine.server.parameters import FORM, TOOLS
from tests.engine.server.serving import MODEL, NAME, Engine, engine
from tests.engine.server.test_chats import call, write_model
from tests.engine.server.told import both

Json = dict[str, Any]
REPEAT = """\
{%- if messages[0].content == 'show' -%}
{{ dict(enable_thinking=enable_thinking | default('-'), thinking=thinking | default('-'),
        thinking_budget=thinking_budget | default('-'), effort=reasoning_effort | default('-')) | tojson }}
{%- elif messages[0].content == 'messages' -%}
{{ messages | tojson }}
{%- else -%}
{{ messages[-1].content }}
{%- endif -%}
"""
# of each family, what its template shows of its tags, what its prompt ends with, and a thought as the model writes it
FAMILIES = {
    "think": ("{# <think></think><tool_call> #}", "", "<think>\n{}\n</think>\n\n"),
    "opened": ("{# [THINK][/THINK][TOOL_CALLS] #}", "[THINK]", "{}\n[/THINK]\n\n"),
    "harmony": (
        "{# <|start|><|channel|> #}", "",
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}  # fmt: skip
THOUGHT = "One, 2, three: naïve 🤷 {it} is"
TOKENIZER = load(resolve(MODEL))


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        served = {}
        for name, (tags, end, _) in FAMILIES.items():
            folder = tmp_path_factory.mktemp(name)
            model = write_model(folder / "model", REPEAT + tags + end)
            (folder / "engine").mkdir()
            flags = ("--max-model-len", "2048")
            served[name] = stack.enter_context(engine(folder / "engine", *flags, model=str(model), wait=False))
        for started in served.values():
            started.wait_ready()
        yield served


def chat(served: Engine, content: str, **fields: Any) -> Json:
    body = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 500} | fields
    with served.http as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told: Json = answer.json()
    return told


def streamed(served: Engine, content: str, **fields: Any) -> list[list[Json]]:
    """The deltas of each choice; their usage must grow to that of the whole answer."""
    asked = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 500, "stream": True}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    with served.http as client, client.stream("POST", "/v1/chat/completions", json=asked | options | fields) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    whole = chat(served, content, **fields)
    assert chunks[-1]["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [[c["delta"] for c in choices if c["index"] == index] for index in range(len(whole["choices"]))]


def text(deltas: list[Json], field: str) -> str:
    return "".join(delta.get(field) or "" for delta in deltas)


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_is_told_apart_whole_and_streamed_by_either_api(thinkers: dict[str, Engine], name: str) -> None:
    served, said = thinkers[name], FAMILIES[name][2].format(THOUGHT)
    end = FAMILIES[name][1]  # which is repeated as well
    answer = chat(served, said + "Yes, it is.", n=3)
    for choice in answer["choices"]:
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, "Yes, it is." + end)
    for deltas in streamed(served, said + "Yes, it is.", n=3):
        assert text(deltas, "reasoning_content") == THOUGHT
        assert text(deltas, "content") == "Yes, it is." + end
        kinds = [key for delta in deltas for key in ("reasoning_content", "content") if delta.get(key)]
        assert kinds == sorted(kinds, reverse=True)  # all of the reasoning comes first
        assert kinds.count("reasoning_content") > 3
    thought = TOKENIZER.encode(said.rstrip())
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    tags = 3 * len(TOKENIZER.encode("<|start|>assistant<|channel|>final<|message|>")) if name == "harmony" else 0
    assert counted == pytest.approx(3 * len(thought) - tags, abs=9)
    response = both(served, input=said + "Yes, it is.")
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == counted // 3


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_strings_end_what_follows_the_reasoning_and_not_the_reasoning(
    thinkers: dict[str, Engine], name: str
) -> None:
    served, said = thinkers[name], FAMILIES[name][2].format("Question: what? " + THOUGHT)
    for stop in ("Question:", "\n\n", "three", ["naïve", "it"]):
        (choice,) = chat(served, said + "No three or it or naïve.\n\nQuestion: more", stop=stop)["choices"]
        content = "No three or it or naïve.\n\nQuestion: more"
        expected = content[: min(content.index(each) for each in ([stop] if isinstance(stop, str) else stop))]
        message = choice["message"]
        assert (message["reasoning_content"], choice["finish_reason"]) == ("Question: what? " + THOUGHT, "stop")
        assert (message["content"] or "") == expected
        (deltas,) = streamed(served, said + content, stop=stop)
        assert (text(deltas, "reasoning_content"), text(deltas, "content")) == (message["reasoning_content"], expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_is_cut_within_its_reasoning_has_no_content(thinkers: dict[str, Engine], name: str) -> None:
    served, said = thinkers[name], FAMILIES[name][2].format(THOUGHT)
    for longest in range(13, 18):
        answer = chat(served, said + "Yes", max_tokens=longest)
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
        assert choice["message"]["reasoning_content"].rstrip("\ufffd") in said  # a tag that is cut is none
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == longest
        (deltas,) = streamed(served, said + "Yes", max_tokens=longest)
        assert text(deltas, "reasoning_content") == choice["message"]["reasoning_content"]
        cut = both(served, input=said + "Yes", max_output_tokens=longest)
        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["type"] for item in cut["output"]] == ["reasoning"]


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("think", call("look_up", '{"name": "a</think>"}') + "\n" + call("wait", "{}")),
        ("opened", '[TOOL_CALLS][{"name": "look_up", "arguments": {"name": "a</think>"}}, {"name": "wait"}]'),
    ],
)
def test_calls_are_told_behind_reasoning(thinkers: dict[str, Engine], name: str, calls: str) -> None:
    served, said = thinkers[name], FAMILIES[name][2].format(THOUGHT + call("wait", "{}"))
    (choice,) = chat(served, said + calls, tools=TOOLS)["choices"]
    message = choice["message"]
    end = FAMILIES[name][1]  # which is repeated as well
    assert (message["reasoning_content"], message["content"]) == (THOUGHT + call("wait", "{}"), end or None)
    functions = [told["function"] for told in message["tool_calls"]]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [
        ("look_up", {"name": "a</think>"}), ("wait", {}),
    ]  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    (deltas,) = streamed(served, said + calls, tools=TOOLS)
    assert text(deltas, "reasoning_content") == message["reasoning_content"]
    parts = [part for delta in deltas for part in delta.get("tool_calls") or []]
    for index, function in enumerate(functions):
        assert "".join(p["function"]["arguments"] for p in parts if p["index"] == index) == function["arguments"]


OFF: Json = {"enable_thinking": False, "thinking": False, "thinking_budget": 0, "effort": "-"}
ON: Json = {"enable_thinking": True, "thinking": True, "thinking_budget": "-"}
SILENT: Json = {"enable_thinking": "-", "thinking": "-", "thinking_budget": "-", "effort": "-"}


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, SILENT),
        ({"reasoning_effort": "none"}, OFF),
        ({"reasoning_effort": "low"}, ON | {"effort": "low"}),
        ({"reasoning_effort": "high"}, ON | {"effort": "high"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, SILENT | {"enable_thinking": False}),
        ({"chat_template_kwargs": {"thinking": True, "thinking_budget": 9}},
         SILENT | {"thinking": True, "thinking_budget": 9}),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False, "reasoning_effort": "x"}},
         ON | {"thinking": False, "effort": "x"}),
    ],
)  # fmt: skip
def test_the_effort_reaches_templates_by_the_names_that_families_have_for_it(
    thinkers: dict[str, Engine], fields: Json, seen: Json
) -> None:
    served = thinkers["think"]
    answer = chat(served, "show", **fields)
    assert json.loads(answer["choices"][0]["message"]["content"]) == seen
    with served.http as client:
        counted = client.post("/tokenize", json={"messages": [{"role": "user", "content": "show"}]} | fields).json()
    assert counted["count"] == answer["usage"]["prompt_tokens"]
    effort = fields.pop("reasoning_effort", None)
    response = both(served, input="show", reasoning=None if effort is None else {"effort": effort}, **fields)
    assert json.loads(response["output"][0]["content"][0]["text"]) == seen


def test_a_thought_goes_back_to_the_template_by_the_names_that_families_have_for_it(
    thinkers: dict[str, Engine],
) -> None:
    """gpt-oss' template takes a thought before a call as `thinking`, and none where there is content as well."""
    calls = [{"id": "c", "type": "function", "function": {"name": "wait", "arguments": "{}"}}]
    history = [
        {"role": "user", "content": "messages"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "assistant", "content": "So.", "reasoning_content": "hm"},
    ]
    (choice,) = chat(thinkers["think"], "", messages=history)["choices"]
    thoughts = [(m.get("reasoning_content"), m.get("thinking")) for m in json.loads(choice["message"]["content"])]
    assert thoughts == [(None, None), ("hm", "hm"), (None, None), ("hm", None), ("hm", None)]


PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("thinking")
    size = letters.tokenizer(PLAIN).get_vocab_size()
    template = letters.TEMPLATE + "{% if enable_thinking is not false %}<think>{% else %}<think></think>{% endif %}"
    with letters.serving(folder, letters.model(size), plain=PLAIN, template=template) as started:
        yield started


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["form", "required", "strict", "auto"])
def test_a_grammar_holds_behind_the_reasoning_and_no_sooner(model: Engine, kind: str, seed: int) -> None:
    """An ending tag is likely, and so are letters before it that no JSON begins with."""
    backend = letters.tokenizer(PLAIN)
    bias = {str(backend.token_to_id("</think>")): 6, str(backend.token_to_id("<tool_call>")): 4, "0": -9}
    tools: list[Any] = TOOLS
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in tools]
    kinds: dict[str, Json] = {
        "form": {"response_format": FORM},
        "required": {"tools": TOOLS, "tool_choice": "required"},
        "strict": {"tools": strict},
        "auto": {"tools": TOOLS, "response_format": FORM},
    }
    asked = kinds[kind] | {"logit_bias": bias, "seed": seed, "max_tokens": 300, "parallel_tool_calls": False}
    answer = chat(model, "the cat", **asked)
    (choice,) = answer["choices"]
    message, counted = choice["message"], answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < counted < answer["usage"]["completion_tokens"]
    calls = message.get("tool_calls") or []
    assert bool(calls) == (choice["finish_reason"] == "tool_calls")
    for told in calls:
        arguments = json.loads(told["function"]["arguments"])
        assert set(arguments) == ({"name", "age"} if told["function"]["name"] == "look_up" else set())
    if kind in ("form", "auto") and not calls:
        assert set(json.loads(message["content"])) == {"name", "age"}
    assert calls or kind in ("form", "auto", "strict")
    (deltas,) = streamed(model, "the cat", **asked)
    assert text(deltas, "reasoning_content") == message.get("reasoning_content", "")
    assert text(deltas, "content") == (message["content"] or "")
    off = chat(model, "the cat", **asked, chat_template_kwargs={"enable_thinking": False})
    assert off["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
