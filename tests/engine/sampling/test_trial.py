"""No grammar ends the process that serves: what would is refused in words, and the next one compiles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import Grammar
from pilotfish_engine.sampling.grammar import Grammars
from pilotfish_engine.sampling.source import MAX_CHARACTERS
from tests.engine.sampling.masks import masks

PIECES = [b"", b"", *(bytes([byte]) for byte in range(256))]
GRAMMARS = Grammars(PIECES, frozenset([1]), len(PIECES), lambda text: [byte + 2 for byte in text.encode()])
PLAIN = Grammar("regex", "[a-z]+")


def chain_of_references(links: int) -> Grammar:
    """Each definition has a property that the next one describes."""
    definitions: dict[str, Any] = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(links)
    }
    definitions[f"a{links}"] = {"type": "string"}
    return Grammar("json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": definitions}))


def chain_of_rules(kind: str, links: int) -> Grammar:
    rules = "".join(f'{kind}{i}: "a" {kind}{i + 1}\n' for i in range(links))
    return Grammar("ebnf", f'start: {kind}0\n{rules}{kind}{links}: "b"\n')


OVERFLOWING = [
    chain_of_references(1000),
    chain_of_references(1700),
    chain_of_rules("r", 6000),
    chain_of_rules("T", 6000),
]


@pytest.mark.parametrize("grammar", OVERFLOWING, ids=["1000 $refs", "1700 $refs", "rules", "terminals"])
def test_what_overflows_a_stack_is_one_request_s_fault(grammar: Grammar) -> None:
    assert len(grammar.text) <= MAX_CHARACTERS
    bad, good = GRAMMARS.compile(grammar), GRAMMARS.compile(Grammar("regex", f"[a-z]{{{len(grammar.text)}}}"))
    with pytest.raises(RequestError, match=r"more time, memory or depth than it may; .* would work"):
        bad.result(60)
    good.result(60)


def test_what_is_deep_as_people_write_it_compiles() -> None:
    for grammar in (chain_of_references(200), chain_of_rules("r", 300), chain_of_rules("T", 1000)):
        GRAMMARS.compile(grammar).result(60)


def schemas(dice: Random, depth: int) -> Any:
    """Of any size, and often of no sense: references to anywhere, numbers without bounds, forms within forms."""
    if depth == 0:
        some = {"$ref": f"#/$defs/d{dice.randrange(9)}"}
        return dice.choice([{}, {"type": "string"}, {"type": "integer"}, True, some])
    few = range(dice.choice([0, 1, 2, 5, 60 if depth == 1 else 3]))
    below = [schemas(dice, depth - 1) for _ in few]
    huge = dice.choice([0, 1, 7, 10**4, 10**9, 10**30, -1])
    return dice.choice(
        [
            {"allOf": below},
            {"anyOf": below, "type": "object"},
            {"oneOf": below},
            {"type": "array", "prefixItems": below, "minItems": huge, "maxItems": huge},
            {"type": "array", "items": below[0] if below else False, "minItems": huge},
            {"type": "object", "properties": {f"p{i}": one for i, one in enumerate(below)}, "required": [f"p{huge}"]},
            {"type": "object", "additionalProperties": below[0] if below else {}, "minProperties": 3},
            {"type": "string", "pattern": patterns(dice, 3), "minLength": huge},
            {"enum": [huge, "x" * min(abs(huge), 3000), *[f"e{i}" for i in few]]},
            {"type": "number", "minimum": -huge, "maximum": huge, "multipleOf": huge},
            {"type": "object", "patternProperties": {patterns(dice, 2): one for one in below}},
        ]
    )


def patterns(dice: Random, depth: int) -> str:
    if depth == 0:
        return dice.choice(["a", ".", "[^b]", r"\p{L}", "(?=x)", "é", "(", "\\", "$"])
    inner = patterns(dice, depth - 1)
    count = dice.choice(["*", "+", "{3}", "{0,1000}", "{70000}", "{1,100000000}"])
    nested, either = "(" * 300 + inner + ")" * 300, f"{inner}|{patterns(dice, depth - 1)}"
    return dice.choice([f"({inner}){count}", either, nested, inner * 20])


def larks(dice: Random) -> str:
    rules = [f"{dice.choice(['r', 'T'])}{i}" for i in range(dice.choice([1, 4, 200]))]
    parts = [*rules, '"a"', "/" + patterns(dice, 2).replace("/", "") + "/", "%json {}", "<[1]>", "~", "&", '"a".."z"']
    lines = [f"{rule}: {' '.join(dice.choices(parts, k=dice.randrange(1, 6)))}" for rule in rules]
    return "\n".join([f"start: {dice.choice(rules)}", *lines])


def hostile(count: int, seed: int) -> Iterator[Grammar]:
    dice = Random(seed)
    for _ in range(count):
        kind = dice.choice(["json_schema", "regex", "ebnf"])
        if kind == "json_schema":
            whole = {"$defs": {f"d{i}": schemas(dice, 1) for i in range(9)}, "allOf": [schemas(dice, 3)]}
            yield Grammar("json_schema", json.dumps(whole))
        else:
            yield Grammar("regex", patterns(dice, 4)) if kind == "regex" else Grammar("ebnf", larks(dice))


@pytest.mark.parametrize("seed", range(4))
def test_generated_grammars_are_refused_or_can_be_followed(seed: int) -> None:
    refused = list[RequestError]()
    for grammar in hostile(100, seed):
        try:
            compiled = GRAMMARS.compile(grammar).result(60)
        except RequestError as error:
            refused.append(error)
            continue
        matcher, dice = compiled.start([], (), False), Random(seed)
        for _ in range(8):
            mask = masks(matcher, [0], [0], len(PIECES))[0]
            allowed = [token for token in range(2, len(PIECES)) if mask and mask[token >> 3] >> (token & 7) & 1]
            if not allowed or matcher.error is not None:
                break
            matcher.advance([dice.choice(allowed)])
    assert 0 < len(refused) < 100
    assert all(str(error).isprintable() and error.field == "grammar" for error in refused)
    GRAMMARS.compile(PLAIN).result(60)
