"""Masks equal those of a language written out; what is no grammar is refused with the reason, and quickly."""

from __future__ import annotations

import json
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import Grammar
from pilotfish_engine.sampling.grammar import MAX_KEPT, Grammars
from pilotfish_engine.sampling.grammar_rows import GrammarRows
from pilotfish_engine.sampling.source import MAX_CHARACTERS, MAX_GBNF_CHARACTERS, MAX_GBNF_RULES
from tests.engine.sampling.masks import masks

# two special tokens, one of them the end; tokens of several letters; and the model has two tokens more than pieces
PIECES = (b"", b"", b"a", b"b", b"ab", b"ba", b"aab", b"c")
STOP, EOS, VOCAB = 0, 1, 10
SHORT = Grammars(PIECES, frozenset([EOS]), VOCAB, lambda text: [PIECES.index(x.encode()) for x in text if x in "abc"])
PRINTABLE = (b"", b"", *(bytes([byte]) for byte in range(32, 127)))
ASCII = Grammars(PRINTABLE, frozenset([1]), len(PRINTABLE), lambda text: encode(text))


def encode(text: str) -> list[int]:
    return [ord(letter) - 30 for letter in text]


def tokens_of(mask: bytes | None) -> set[int] | None:
    return None if mask is None else {token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1}


def written_out(language: set[str], text: str, ends: set[int], ends_late: bool) -> set[int]:
    after = {
        token
        for token, piece in enumerate(PIECES)
        if piece and any(word.startswith(text + piece.decode()) for word in language)
    }
    return after | ends if text in language and not (after and ends_late) else after


@settings(deadline=None, max_examples=120)
@given(
    st.sets(st.text("ab", max_size=6), min_size=1, max_size=6).filter(lambda words: words != {""}),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, len(PIECES) - 1)), max_size=8),
    st.lists(st.integers(0, 5), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_masks_are_those_of_the_language(language, drafts, steps, ends_late, with_stop):
    ends = {EOS, STOP} if with_stop else {EOS}
    # else, where the text is certain, the library allows but the one token that the tokenizer would write it with
    regex = "|".join(f"({word})" for word in sorted(language))
    compiled = SHORT.compile(Grammar("ebnf", f'%llguidance {{"no_forcing": true}}\nstart: /{regex}/')).result()
    # an answer that the language allows, by choosing among what it allows
    answer, text = [], ""
    for step in steps:
        possible = sorted(written_out(language, text, set(), False))
        if possible:
            answer.append(possible[step % len(possible)])
            text += PIECES[answer[-1]].decode()
    whole = compiled.start(answer, [STOP, 2] if with_stop else [2], ends_late)
    grown = compiled.start([], [STOP, 2] if with_stop else [2], ends_late)
    grown.advance(answer[:1])
    grown.advance(answer[1:])
    nodes: list[tuple[int, int]] = [(0, 7)]
    for parent, token in drafts:
        nodes.append((parent % len(nodes), token))
    parents, token_ids = [parent for parent, _ in nodes], [token for _, token in nodes]
    expected: list[set[int] | None] = [written_out(language, text, ends, ends_late)]
    texts = [text]
    for parent, token in nodes[1:]:
        above = expected[parent]
        alive = above is not None and token in above and token not in ends
        texts.append(texts[parent] + PIECES[token].decode())
        expected.append(written_out(language, texts[-1], ends, ends_late) if alive else None)
    for matcher in (whole, grown, whole):  # drafts leave no trace
        assert [tokens_of(mask) for mask in masks(matcher, token_ids, parents, VOCAB)] == expected
        assert matcher.error is None


def test_after_the_end_anything_may_come_and_a_forbidden_token_is_an_error():
    compiled = SHORT.compile(Grammar("regex", "ab*")).result()
    matcher = compiled.start([2, EOS, 5], [], False)
    assert masks(matcher, [5, 2], [0, 0], VOCAB) == [None, None]
    assert matcher.error is None
    matcher = compiled.start([2], [], False)
    matcher.advance([2, 3])
    assert matcher.error is not None
    assert masks(matcher, [2], [0], VOCAB) == [None]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), '{"a": [1, {"b": null}]}', "[1]"),
        (Grammar("json_schema", json.dumps(SCHEMA)), '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": "3"}'),
        (Grammar("regex", r"\d{3}-\d{4}"), "555-1234", "555-12345"),
        (Grammar("ebnf", 'root ::= "yes" | "no" [.!]+'), "no.!", "yes."),
        (Grammar("ebnf", 'start: "yes" | "no" /[.!]+/'), "no.!", "yes."),
    ],
)
def test_every_kind(grammar, good, bad):
    def fits(text: str) -> bool:
        matcher = ASCII.compile(grammar).result().start([], [], False)
        for token in [*encode(text), 1]:
            (mask,) = masks(matcher, [0], [0], len(PRINTABLE))
            if token not in (tokens_of(mask) or ()):
                return False
            matcher.advance([token])
        return matcher.error is None

    assert fits(good)
    assert not fits(bad)


@pytest.mark.parametrize("grammar", [Grammar("json_object"), Grammar("json_schema", json.dumps(SCHEMA))])
@pytest.mark.parametrize("indent", [None, 2, 20])
def test_json_may_be_indented_but_white_space_comes_to_an_end(grammar, indent):
    grammars = Grammars([b"", b"", *(bytes([code]) for code in range(2, 128))], frozenset([1]), 128, list_of_codes)
    compiled = grammars.compile(grammar).result()
    matcher = compiled.start([], [], False)
    for token in [*list_of_codes(json.dumps({"name": "Bob", "age": 3}, indent=indent)), 1]:
        assert token in (tokens_of(masks(matcher, [0], [0], 128)[0]) or ())
        matcher.advance([token])
    matcher = compiled.start(list_of_codes('{"name":'), [], False)
    blanks = 0
    while blank := set(b" \n\t\r") & (tokens_of(masks(matcher, [0], [0], 128)[0]) or set()):
        matcher.advance([min(blank)])
        blanks += 1
    assert 0 < blanks <= 50


def list_of_codes(text: str) -> list[int]:
    return list(text.encode())


def test_an_answer_that_no_token_can_continue_is_an_error_with_a_reason():
    matcher = SHORT.compile(Grammar("regex", "a(x|bc)")).result().start([2, 3], [], False)
    assert masks(matcher, [3], [0], VOCAB) != [None]
    matcher = SHORT.compile(Grammar("regex", "ab?x|ac")).result().start([4], [], False)
    assert masks(matcher, [4], [0], VOCAB) == [b"\xff" * 4], "any, as the request ends"
    assert matcher.error


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "a(("), "unclosed group"),
        (Grammar("regex", "(" * 5000), "regex"),
        (Grammar("regex", "z+"), "no answer can begin"),
        (Grammar("regex", "a" * (MAX_CHARACTERS + 1)), f"{MAX_CHARACTERS} at most"),
        (Grammar("json_schema", '{"type": "nope"}'), "nope"),
        (Grammar("json_schema", '{}}], "x": [{'), "not JSON"),
        (Grammar("json_schema", "[" * 100_000), "not JSON"),
        (Grammar("json_schema", '{"a":' * 5000 + "1" + "}" * 5000), "json_schema"),
        (Grammar("json_schema", '{"$ref": "#"}'), "no answer can begin"),
        (Grammar("json_schema", '{"$ref": "http://other.example/schema"}'), "Resource"),
        (Grammar("ebnf", "root ::= other"), "other"),
        (Grammar("ebnf", "root ::= " + "(" * 9000), "ebnf"),
        (Grammar("ebnf", 'root ::= "a"' + " " * MAX_GBNF_CHARACTERS), f"{MAX_GBNF_CHARACTERS} and"),
        (Grammar("ebnf", "".join(f"r{i} ::= r{i + 1}\n" for i in range(MAX_GBNF_RULES + 1))), f"{MAX_GBNF_RULES} at"),
        (Grammar("ebnf", "\n" * MAX_CHARACTERS), "ebnf"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(grammar, reason):
    began = time.monotonic()
    with pytest.raises(RequestError, match=reason) as caught:
        SHORT.compile(grammar).result()
    assert caught.value.field == "grammar"
    assert len(str(caught.value)) < 500
    assert "start: /" not in str(caught.value), "a rule that the client never wrote"
    assert time.monotonic() - began < 20


def test_a_model_without_an_end_token_takes_no_grammar():
    with pytest.raises(RequestError, match="no end token"):
        Grammars(PIECES, frozenset(), VOCAB, lambda _: []).compile(Grammar("regex", "a")).result()


def test_the_last_grammars_are_kept():
    grammars = Grammars(PIECES, frozenset([EOS]), VOCAB, lambda _: [])
    first = grammars.compile(Grammar("regex", "a"))
    assert grammars.compile(Grammar("regex", "a")) is first
    for count in range(2, MAX_KEPT + 2):
        grammars.compile(Grammar("regex", f"a{{{count}}}"))
    assert grammars.compile(Grammar("regex", "a")) is not first


@pytest.mark.parametrize(
    "definitions",
    [
        {"A": {"$ref": "#/$defs/A"}},
        {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
        {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}},
    ],
)
def test_what_shows_only_while_matching_is_the_request_s_own_fault(definitions):
    """Of two rows the other goes on."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "$defs": definitions}
    grammars = [Grammar("json_schema", json.dumps(schema)), Grammar("regex", '[{":a]+')]
    rows = GrammarRows(len(PRINTABLE), torch.device("cpu"))
    for row, grammar in enumerate(grammars):
        rows.admit(row, ASCII.compile(grammar).result().start((), (), False))
    errors: dict[int, RequestError] = {}
    for letter in '{"a":':
        rows.allowed(rows.ask([0, 1]))
        errors |= rows.advance([0, 1], [encode(letter)] * 2)
    rows.allowed(rows.ask([0, 1]))
    errors |= rows.advance([0, 1], [encode('"')] * 2)
    assert list(errors) == [0]
    assert errors[0].field == "grammar"
    assert "nothing can follow here" in str(errors[0])
