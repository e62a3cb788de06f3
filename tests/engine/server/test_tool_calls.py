"""Calls in an answer's text: found however the text is cut, and in what a grammar lets through."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.messages import Grammar
from pilotfish_engine.sampling.grammar import Grammars
from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_calls import Calls, Style, style_of

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "a ::= b"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Function(name="get_weather", parameters=CITY)
TIME = Function(name="get_time")
BYTES = (b"", b"", *(bytes([byte]) for byte in range(256)))
GRAMMARS = Grammars(BYTES, frozenset([1]), len(BYTES), lambda text: [byte + 2 for byte in text.encode()])

Told = tuple[str, list[tuple[str, str]]]


def read(style: Style, parts: list[str], several: bool = True) -> Told:
    reader = Calls(style, [WEATHER, TIME], required=False, several=several).reader()
    content, calls = "", list[tuple[str, str]]()
    for number, part in enumerate(parts):
        found = reader.feed(part, last=number == len(parts) - 1)
        content += found.content
        for call in found.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return content, calls


def tag(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


PARIS = '{"city": "Pa}r\\"is", "x": [{}, "]"]}'
CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
HERMES: list[tuple[str, Told]] = [
    ("just text, <tool and {}", ("just text, <tool and {}", [])),
    ("text \n", ("text \n", [])),
    (tag(CALL), ("", [("get_weather", PARIS)])),
    ("\n\n" + tag(CALL) + "\n", ("", [("get_weather", PARIS)])),
    (f"Let me see. \n{tag(CALL)}", ("Let me see.", [("get_weather", PARIS)])),
    (tag(CALL) + "\n" + tag('{"name":"get_time","arguments":{}}'), ("", [("get_weather", PARIS), ("get_time", "{}")])),
    (tag(CALL) + " Done. ", (" Done.", [("get_weather", PARIS)])),
    ('<tool_call>{ "name" : "f" , "parameters" : {"a": 1} }</tool_call>', ("", [("f", '{"a": 1}')])),
    # in another order, as a string of JSON, without arguments, with more than there should be
    (tag('{"arguments": {"a": "ü"}, "name": "f"}'), ("", [("f", '{"a": "ü"}')])),
    (tag('{"name": "f", "arguments": "{\\"a\\": 1}"}'), ("", [("f", '{"a": 1}')])),
    (tag('{"name": "f"}'), ("", [("f", "{}")])),
    (tag('{"name": "f", "arguments": null}'), ("", [("f", "{}")])),
    (tag('{"name": "f", "arguments": {}, "id": 7}'), ("", [("f", "{}")])),
    # the closing tag forgotten, the answer cut short
    ("<tool_call>" + CALL + tag(CALL), ("", [("get_weather", PARIS)] * 2)),
    ("<tool_call>" + CALL, ("", [("get_weather", PARIS)])),
    ("<tool_call>" + CALL[:-20], ("", [("get_weather", PARIS[:-19])])),
    # no calls at all
    (tag("get_weather(city=1)"), (tag("get_weather(city=1)"), [])),
    (tag('{"name": 1, "arguments": {}}'), (tag('{"name": 1, "arguments": {}}'), [])),
    (tag('{"name": "f", "arguments": [1]}'), (tag('{"name": "f", "arguments": [1]}'), [])),
    ('a <tool_call>{"na', ('a <tool_call>{"na', [])),
    ("a <tool_ca", ("a <tool_ca", [])),
]
LLAMA: list[tuple[str, Told]] = [
    ("just text {", ("just text {", [])),
    (CALL.replace("arguments", "parameters"), ("", [("get_weather", PARIS)])),
    (" \n" + CALL, ("", [("get_weather", PARIS)])),
    (CALL + "; " + CALL + "\n", ("", [("get_weather", PARIS)] * 2)),
    (CALL + '\n{"name": "get_time", "parameters": {}}', ("", [("get_weather", PARIS), ("get_time", "{}")])),
    (CALL + " Done.", ("Done.", [("get_weather", PARIS)])),
    (CALL[:-20], ("", [("get_weather", PARIS[:-19])])),
    ('{"name": "get_weather", "par', ('{"name": "get_weather", "par', [])),
    # an object that is the answer itself
    ('{"name": "Bob", "parameters": {"a": 1}}', ('{"name": "Bob", "parameters": {"a": 1}}', [])),
    ('{"na me": "get_time", "parameters": {}}', ('{"na me": "get_time", "parameters": {}}', [])),
    ('{"name": "get _time", "parameters": {}}', ('{"name": "get _time", "parameters": {}}', [])),
    (" " * 3000 + "a", (" " * 3000 + "a", [])),
]
CASES: list[tuple[Style, str, Told]] = [
    *(("hermes", text, told) for text, told in HERMES),
    *(("json", text, told) for text, told in LLAMA),
]


@pytest.mark.parametrize(("style", "text", "told"), CASES)
def test_calls_are_found_in_text_however_it_is_cut(style: Style, text: str, told: Told) -> None:
    assert read(style, [text]) == told
    assert read(style, [*text, ""]) == told
    for at in range(min(len(text), 200)):
        assert read(style, [text[:at], text[at:]]) == told


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", CALL, "\n", " ", "text", "<", '{"name": "', "}", "; "])),
    st.lists(st.integers(0, 200)),
    st.sampled_from(["hermes", "json"]),
)
def test_what_is_told_does_not_depend_on_the_cuts(parts: list[str], cuts: list[int], style: Style) -> None:
    text = "".join(parts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read(style, [text[a:b] for a, b in itertools.pairwise(bounds)]) == read(style, [text])


def test_of_several_calls_only_the_first_is_told_where_one_may_come() -> None:
    assert read("hermes", [tag(CALL), "\n", tag(CALL)], several=False) == ("", [("get_weather", PARIS)])
    assert read("json", [*CALL, ";", *CALL], several=False) == ("", [("get_weather", PARIS)])


def fits(grammar: Grammar, text: str) -> bool:
    matcher = GRAMMARS.compile(grammar).result().start([], [], False)
    for token in [*(byte + 2 for byte in text.encode()), 1]:
        (mask,) = matcher.masks([0], [0])
        if mask is None or not mask[token >> 3] >> (token & 7) & 1:
            return False
        matcher.advance([token])
    return matcher.error is None


@pytest.mark.parametrize("style", ["hermes", "json"])
def test_a_grammar_lets_calls_through_that_the_reader_finds(style: Style) -> None:
    key, joint = ("arguments", "\n") if style == "hermes" else ("parameters", "; ")
    good, empty = (
        f'{{"name": "{name}", "{key}": {arguments}}}'
        for name, arguments in (("get_weather", '{"city": "Rome"}'), ("get_time", "{}"))
    )
    wrap = tag if style == "hermes" else str
    calls = Calls(style, [WEATHER, TIME], required=True, several=True)
    for text, count in ((wrap(good), 1), (wrap(empty), 1), (wrap(good) + joint + wrap(empty), 2)):
        assert fits(calls.grammar(None), text)
        assert len(read(style, [text])[1]) == count
    wrong = good.replace("city", "town")
    for text in (wrap(wrong), wrap(good.replace("weather", "wealth")), "Hello", "x" + wrap(good), ""):
        assert not fits(calls.grammar(None), text)
    one = Calls(style, [WEATHER], required=True, several=False).grammar(None)
    assert fits(one, wrap(good))
    assert not fits(one, wrap(good) + joint + wrap(good))
    assert not fits(one, wrap(empty))


def test_a_form_may_be_asked_for_beside_calls_that_are_not_required() -> None:
    form = Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
    calls = Calls("hermes", [TIME], required=False, several=True)
    assert fits(calls.grammar(form), '{"a": 5}')
    assert fits(calls.grammar(form), tag('{"name": "get_time", "arguments": {}}'))
    assert not fits(calls.grammar(form), '{"a": "5"}')
    assert fits(calls.grammar(Grammar("json_object")), '{"b": []}')


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}", None),
        ("{{ tools }} {{ '\"parameters\": ' }}", "json"),
        ("{{ tools }} [TOOL_CALLS]", None),
    ],
)
def test_the_template_says_how_calls_are_written(template: str, style: Style | None) -> None:
    assert style_of(template) == style
