"""Calls in an answer's text: found however the text is cut, and in what a grammar lets through."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.messages import Grammar
from pilotfish_engine.sampling.grammar import Grammars
from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.parts import CallPart, Content
from pilotfish_engine.server.tool_calls import Calls
from pilotfish_engine.server.tool_formats import BY_NAME, FORMATS, detected
from tests.engine.sampling.masks import masks
from tests.engine.server.written_calls import CITY, FUNCTIONS, TIME, WEATHER, WRITTEN, Written, tag

MARKERS = sorted({marker for each in FORMATS for marker in each.markers})
BYTES = (b"", b"", *(bytes([byte]) for byte in range(256)), *(b"" for _ in MARKERS))
SPECIALS = {marker: 258 + number for number, marker in enumerate(MARKERS)}
GRAMMARS = Grammars(BYTES, frozenset([1]), len(BYTES), lambda text: [byte + 2 for byte in text.encode()])
NAMES = [each.name for each in FORMATS]
# of each format, what its template shows beside the way itself
TEMPLATES = dict.fromkeys(NAMES, "tools") | {"deepseek": "```json"}
Spelled = tuple[str, str, bool]  # a format, its template, whether its tags are special tokens
SPELLED: list[Spelled] = [
    (name, template, special)
    for name, template in (*TEMPLATES.items(), ("deepseek", ""), ("mistral", "[ARGS]"), ("mistral", "[CALL_ID] [ARGS]"))
    for special in (False, True)
    if name != ("gemma3" if special else "harmony")
]


def calls(
    name: str,
    functions: list[Function] = FUNCTIONS,
    required: bool = False,
    several: bool = True,
    template: str = "",
    special: bool = False,
) -> Calls:
    """special: every tag is a special token."""
    specials = {marker: SPECIALS[marker] for marker in BY_NAME[name].markers} if special else {}
    return Calls(BY_NAME[name], functions, required, several, template, specials)


def read(name: str, parts: list[str], several: bool = True) -> tuple[str, list[tuple[str, str, bool]]]:
    """The content, and of each call its name, its arguments' text and whether it is whole."""
    reader = calls(name, several=several).reader()
    content, found, ids = "", list[tuple[str, str, bool]](), set[str]()
    for number, part in enumerate(parts):
        for told in reader.feed(part, last=number == len(parts) - 1):
            match told:
                case Content(text):
                    content += text
                case CallPart(index, called, arguments, call_id, whole):
                    if called is not None:
                        assert index == len(found)
                        assert call_id is not None
                        assert call_id not in ids
                        ids.add(call_id)
                        found.append((called, "", False))
                    assert index == len(found) - 1
                    assert not found[index][2]
                    found[index] = (found[index][0], found[index][1] + arguments, whole)
    return content, found


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("written", WRITTEN, ids=lambda w: f"{w.format}-{w.text[:24]!r}")
def test_calls_are_found_in_text_however_it_is_cut(written: Written) -> None:
    told = read(written.format, [written.text])
    assert (told[0], [(name, json.loads(arguments)) for name, arguments, _ in told[1]]) == (
        written.content,
        list(written.calls),
    )
    assert all(whole for _, _, whole in told[1])
    assert read(written.format, [*written.text[:600], written.text[600:]]) == told
    assert read(written.format, [written.text, ""]) == told
    for at in range(min(len(written.text), 300)):
        assert read(written.format, [written.text[:at], written.text[at:]]) == told


@pytest.mark.parametrize("written", WRITTEN, ids=lambda w: f"{w.format}-{w.text[:24]!r}")
def test_an_answer_that_is_cut_short_loses_nothing(written: Written) -> None:
    """What was not told as a call by then is content; arguments that were begun are those of the whole answer."""
    whole = read(written.format, [written.text])
    for at in range(min(len(written.text), 300)):
        text = written.text[:at]
        content, found = read(written.format, [text])
        assert len(found) <= len(whole[1])
        for (name, arguments, done), (told, expected, _) in zip(found, whole[1], strict=False):
            assert name == told
            assert expected.startswith(arguments)
            assert not done or arguments == expected
        if not found and written.format != "harmony":
            assert content.split() == text.split()


PIECES = sorted({piece for w in WRITTEN for piece in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|```\w*|\w+|\s|.", w.text)})


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(NAMES), st.data())
def test_what_is_told_does_not_depend_on_the_cuts(name: str, data: st.DataObject) -> None:
    mine = [w.text for w in WRITTEN if w.format == name]
    text = "".join(data.draw(st.lists(st.sampled_from(mine) | st.sampled_from(PIECES), max_size=8)))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert read(name, cut(text, places)) == read(name, [text]) == read(name, [*text, ""])


@pytest.mark.parametrize("name", NAMES)
def test_of_several_calls_only_the_first_is_told_where_one_may_come(name: str) -> None:
    text = next(w.text for w in WRITTEN if w.format == name and len(w.calls) == (1 if name == "harmony" else 2))
    _, first, *_ = [read(name, [text])[1][:1]] * 2
    assert read(name, [*text], several=False)[1] == first


def test_ids_are_the_models_own_where_it_has_some() -> None:
    def ids(name: str, text: str) -> list[str | None]:
        return [part.id for part in calls(name).reader().feed(text, True) if isinstance(part, CallPart) and part.name]

    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}") == ["abcDEF123"]
    assert all(
        re.fullmatch("[a-zA-Z0-9]{9}", i or "") for i in ids("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}")
    )
    one = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    first, second = ids("kimi_k2", f"<|tool_calls_section_begin|>{one}{one}<|tool_calls_section_end|>")
    assert first == "functions.f:3" != second


def tokens(text: str, special: bool) -> list[int]:
    marks = sorted(set(MARKERS) - {"```", "```tool_code"}, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if special else [text]
    return [
        token
        for part in parts
        for token in ([SPECIALS[part]] if special and part in SPECIALS else [byte + 2 for byte in part.encode()])
    ]


def fits(grammar: Grammar | None, text: str, special: bool = False) -> bool:
    assert grammar is not None
    matcher = GRAMMARS.compile(grammar).result().start([], [], False)
    for token in [*tokens(text, special), 1]:
        (mask,) = masks(matcher, [0], [0], len(BYTES))
        if mask is not None and not mask[token >> 3] >> (token & 7) & 1:
            return False
        matcher.advance([token])
    return matcher.error is None


def spelled(how: Spelled, arguments: dict[str, object], function: Function = WEATHER) -> str:
    """A call as a grammar has it that allows only these arguments: the first of the tokens that may follow, each time,
    which are no blanks."""
    name, template, special = how
    properties = {key: {"const": value} for key, value in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    grammar = calls(name, [Function(name=function.name, parameters=schema)], True, False, template, special).grammar(
        None
    )
    assert grammar is not None
    matcher = GRAMMARS.compile(grammar).result().start([], [], False)
    text = bytearray()
    while len(text) < 2000:
        (mask,) = masks(matcher, [0], [0], len(BYTES))
        assert mask is not None
        allowed = [token for token in range(1, len(BYTES)) if mask[token >> 3] >> (token & 7) & 1]
        if 1 in allowed:
            return text.decode()
        token = min(allowed, key=lambda token: (BYTES[token].isspace(), token == SPECIALS["<|channel|>"], -token))
        text += BYTES[token] or MARKERS[token - 258].encode()
        matcher.advance([token])
    raise AssertionError(text)


@pytest.mark.parametrize("how", SPELLED, ids=str)
def test_a_grammar_lets_calls_through_that_the_reader_finds(how: Spelled) -> None:
    name, template, special = how

    def grammar(functions: list[Function] = FUNCTIONS, several: bool = True) -> Grammar | None:
        return calls(name, functions, True, several, template, special).grammar(None)

    text = spelled(how, {"city": "Rome", "days": 2})
    content, found = read(name, [text])
    assert (content, [(called, json.loads(said), whole) for called, said, whole in found]) == (
        "",
        [("get_weather", {"city": "Rome", "days": 2}, True)],
    )
    assert fits(grammar(), text, special)
    for wrong in (text.replace("city", "town"), text.replace("weather", "wealth"), "Hello", "", text.replace("2", "x")):
        assert not fits(grammar(), wrong, special)
    assert not fits(grammar([TIME]), text, special)
    assert fits(grammar([TIME]), spelled(how, {}, TIME), special)
    assert fits(grammar(several=False), text, special)
    assert not fits(grammar(several=False), text + text, special)


@pytest.mark.parametrize("how", [how for how in SPELLED if how[0] != "harmony"], ids=str)
def test_a_strict_function_is_enforced_where_calls_are_left_to_the_model(how: Spelled) -> None:
    name, template, special = how
    text = spelled(how, {"city": "Rome"})
    strict = Function(name="get_weather", parameters=CITY, strict=True)
    free = calls(name, [strict], template=template, special=special).grammar(None)
    assert calls(name, template=template).grammar(None) is None  # nobody asked for it
    assert fits(free, text, special)
    assert fits(free, "Hello [and] {more}, in free words", special)
    assert fits(free, "", special)
    assert not fits(free, text.replace("city", "town"), special)
    assert not fits(free, text.replace("weather", "wealth"), special)
    start = BY_NAME[name].spelling(template).start
    if start:
        assert fits(free, "Let me see.\n" + text, special)
        assert fits(free, text.replace(start, start + "\n", 1), special)


def test_a_form_may_be_asked_for_beside_calls_that_are_not_required() -> None:
    form = Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
    either = calls("hermes", [TIME])
    assert fits(either.grammar(form), '{"a": 5}')
    assert fits(either.grammar(form), tag('{"name": "get_time", "arguments": {}}'))
    assert not fits(either.grammar(form), '{"a": "5"}')
    assert fits(either.grammar(Grammar("json_object")), '{"b": []}')


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}", "qwen3_coder"),
        ("{% if tools %}<tool_call>f\n<arg_key>{% endif %}", "glm45"),
        ("{{ tools }} {{ '\"parameters\": ' }}", "llama3_json"),
        ("{{ tools }} [func_name1(params_name1=1)]", "pythonic"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <｜tool▁calls▁begin｜>", "deepseek"),
        ("{{ tools }} <|tool_calls_section_begin|>", "kimi_k2"),
        ("{{ tools }} <|tool_call|>", "granite"),
        ("<|tool|>{{ tools }}<|/tool|> <|tool_call|>", "phi4_mini"),
        ("<|start|>assistant<|channel|>", "harmony"),
    ],
)
def test_the_template_says_how_calls_are_written(template: str, name: str | None) -> None:
    found = detected(template)
    assert (None if found is None else found.name) == name
