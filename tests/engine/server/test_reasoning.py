"""Reasoning told apart from what follows it, however an answer is cut; and grammars that begin behind it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.messages import Grammar, Stage
from pilotfish_engine.sampling.grammar import Grammars
from pilotfish_engine.server.parts import CallPart, Content, ContentReader, Part, Reader, Reasoning, joined
from pilotfish_engine.server.reasoning import BY_NAME, ReasoningReader, detected, opened
from pilotfish_engine.server.tool_formats import BY_NAME as FORMATS
from tests.engine.sampling.masks import masks
from tests.engine.server.written_calls import FUNCTIONS, harmony, tag

# style, whether the prompt has opened the reasoning, an answer, its reasoning, its content, characters of reasoning
CASES = [
    ("think", False, "<think>\nA b.\n</think>\n\nYes. ", "A b.", "Yes. ", 21),
    ("think", True, "A b.\n</think>\n\nYes.", "A b.", "Yes.", 13),
    ("think", True, "<think>A</think>Yes.", "A", "Yes.", 16),  # a model that opens it again
    ("think", True, "</think>Yes.", "", "Yes.", 8),
    ("think", True, "A b and so on", "A b and so on", "", 13),  # cut
    ("think", True, "A </thi", "A </thi", "", 7),
    ("think", False, "<think>\n\n</think>\n\nYes.", "", "Yes.", 17),
    ("think", False, "Yes <think>no</think>", "", "Yes <think>no</think>", 0),
    ("think", False, "<thin", "", "<thin", 0),
    ("think", False, " \n<think>A</think> <think>B</think>", "A", "<think>B</think>", 18),
    ("mistral", False, "[THINK]A[/THINK]Yes", "A", "Yes", 16),
    ("seed_oss", True, "A</seed:think>Yes", "A", "Yes", 14),
    ("granite", False, "Here is my thought process: A\n\nHere is my response: Yes", "A", "Yes", 51),
    ("granite", False, "Here is a poem", "", "Here is a poem", 0),
]
BYTES = (b"", b"", b"", *(bytes([byte]) for byte in range(256)), b"k>\n", b">}", b"</think>", b"ink>{", b"\n\n{")
GRAMMARS = Grammars(BYTES, frozenset([1]), len(BYTES), lambda text: [byte + 3 for byte in text.encode()])
JSON = Grammar("json_schema", '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}')


def fed(reader: Reader, parts: list[str]) -> list[Part]:
    return joined([told for n, part in enumerate(parts) for told in reader.feed(part, last=n == len(parts) - 1)])


def texts(parts: list[Part]) -> tuple[str, str]:
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return reasoning, "".join(part.text for part in parts if isinstance(part, Content))


@pytest.mark.parametrize(("style", "is_open", "text", "reasoning", "content", "reasoned"), CASES)
def test_reasoning_is_told_apart_however_it_is_cut(
    style: str, is_open: bool, text: str, reasoning: str, content: str, reasoned: int
) -> None:
    def reader() -> ReasoningReader:
        return ReasoningReader(BY_NAME[style], is_open, ContentReader())

    for parts in ([text], [*text], [*text, ""], *([text[:at], text[at:]] for at in range(len(text)))):
        used = reader()
        assert texts(fed(used, parts)) == (reasoning, content)
        assert used.reasoned == reasoned


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", tag('{"name": "f", "arguments": {}}'), " \n", "a", "<"])
    ),
    st.lists(st.integers(0, 120)),
    st.booleans(),
)
def test_what_is_told_does_not_depend_on_the_cuts(words: list[str], cuts: list[int], is_open: bool) -> None:
    text = "".join(words)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]

    def told(parts: list[str]) -> list[Part]:
        reader = FORMATS["hermes"].reader(FUNCTIONS, True)
        found = fed(ReasoningReader(BY_NAME["think"], is_open, reader), parts)
        return [CallPart(p.index, p.name, p.arguments, None, p.whole) if isinstance(p, CallPart) else p for p in found]

    assert told([text[a:b] for a, b in itertools.pairwise(bounds)]) == told([text])


def test_harmonys_channels_are_reasoning_content_and_calls() -> None:
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for behind, content, name in (
        ("<|channel|>final<|message|>Yes", "Yes", None),
        (harmony("get_time", "{}"), "", "get_time"),
    ):
        for parts in ([analysis + behind], [*analysis, *behind]):
            reader = FORMATS["harmony"].reader(FUNCTIONS, True)
            found = fed(reader, parts)
            assert texts(found) == ("Hm.", content)
            assert [part.name for part in found if isinstance(part, CallPart)] == ([name] if name else [])
            assert reader.reasoned == analysis.index("<|start|>")


@pytest.mark.parametrize(
    ("template", "tokens", "style"),
    [
        ("{{ x.split('</think>') }}", [], "think"),
        ("plain", ["<think>", "</think>"], "think"),
        ("plain", ["<think>"], None),
        ("plain", ["[THINK]", "[/THINK]"], "mistral"),
        ("<|start|>assistant<|channel|>", [], "harmony"),
        ("plain", [], None),
    ],
)
def test_the_template_or_the_vocabulary_says_how_a_model_reasons(
    template: str, tokens: list[str], style: str | None
) -> None:
    found = detected(template, lambda text: text in tokens)
    assert (None if found is None else found.name) == style


def test_a_prompt_has_opened_reasoning_where_it_ends_with_its_tag() -> None:
    assert opened(BY_NAME["think"], "<|im_start|>assistant\n<think>\n")
    assert not opened(BY_NAME["think"], "<|im_start|>assistant\n<think>\n\n</think>\n\n")


def encoded(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


def long(piece: bytes) -> int:
    return BYTES.index(piece)


def follows(grammar: Grammar, token_ids: list[int]) -> bool:
    """Whether each token may follow those before it, and the answer's end all of them: asked one by one, and of a tree
    that is one chain, where a draft's end is a node that nothing follows."""
    matcher = GRAMMARS.compile(grammar).result().start([], [], False)
    chain = GRAMMARS.compile(grammar).result().start([], [], False)
    whole = masks(chain, [0, *token_ids], list(range(-1, len(token_ids))), len(BYTES))
    for at, token in enumerate([*token_ids, 1]):
        (mask,) = masks(matcher, [0], [0], len(BYTES))
        assert mask == whole[at]
        if mask is not None and not mask[token >> 3] >> (token & 7) & 1:
            return False
        matcher.advance([token])
        assert matcher.error is None
    return True


THINK = Stage(("</think>",))
GOOD, BAD = encoded('{"a": 1}'), encoded('{"b": 1}')


def test_a_grammar_begins_behind_the_reasoning_wherever_tokens_part() -> None:
    grammar = Grammar(JSON.kind, JSON.text, (THINK,))
    thought = encoded('Hm {"b": 1} </thin </')
    for end in (encoded("</think>"), [long(b"</think>")], [*encoded("</thin"), long(b"k>\n")], encoded("</think>\n\n")):
        assert follows(grammar, [*thought, *end, *GOOD])
        assert not follows(grammar, [*thought, *end, *BAD])
    assert follows(grammar, [long(b"</think>"), long(b"\n\n{"), *GOOD[1:]])
    assert follows(grammar, thought)  # an answer may end in its reasoning
    # a token that goes on behind the end would hide bytes from the grammar
    assert not follows(grammar, [*encoded("</th"), long(b"ink>{"), *GOOD[1:]])
    assert not follows(grammar, [*encoded("</think"), long(b">}")])
    assert follows(grammar, [*encoded("</thick"), long(b">}")])


def test_reasoning_that_a_model_may_open_itself_may_also_be_left_out() -> None:
    grammar = Grammar(JSON.kind, JSON.text, (Stage((), (0,), begin=2),))
    assert follows(grammar, GOOD)
    assert not follows(grammar, BAD)
    assert follows(grammar, [2, *BAD, 0, *GOOD])
    assert not follows(grammar, [2, *GOOD, 0, *BAD])
    assert not follows(grammar, [*GOOD[:3], 2])


def test_stages_follow_each_other() -> None:
    grammar = Grammar(JSON.kind, JSON.text, (Stage(("</think>",), (), begin=2), Stage(("<t>",))))
    assert follows(grammar, [2, *encoded("<t>no</think>some text <t>"), *GOOD])
    assert follows(grammar, encoded("some <text>"))
    assert not follows(grammar, [*encoded("some <t>"), *BAD])
    assert not follows(grammar, [2, *encoded("a</think><t>"), *BAD])
