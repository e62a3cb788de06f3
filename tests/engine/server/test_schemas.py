"""Schemas are made plain without a change of meaning, and what no grammar follows is refused by its path."""

from __future__ import annotations

import decimal
import enum
import json
import random
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import pydantic
import pytest
from llguidance import LLMatcher

from pilotfish_engine.server.schemas import SchemaError, plain
from tests.engine.server.serving import NAME, Engine

STRING = {"type": "string"}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # of a Decimal, in pydantic's older versions


def refused(schema: Any) -> str:
    error: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return error


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = pydantic.Field(9, ge=0, le=9, examples=[9], deprecated=True)


class Dog(pydantic.BaseModel):
    """A dog."""

    kind: Literal["dog"]
    friends: list[Dog] = []


class Values(pydantic.BaseModel):
    lasts: timedelta
    at: datetime
    on: date
    then: time
    ident: uuid.UUID
    ident4: pydantic.UUID4
    address: pydantic.IPvAnyAddress
    price: decimal.Decimal
    colour: Colour
    pair: tuple[int, str]
    counts: dict[Colour, int]
    named: dict[str, float]
    constrained: dict[pydantic.constr(pattern="^[a-z]+$"), int]  # type: ignore[valid-type]
    picked: Literal["a", 1, None]


class Everything(Values):
    model_config = pydantic.ConfigDict(title="All", json_schema_extra={"x-note": {"a": 1}, "$comment": "c"})

    pet: Cat | Dog = pydantic.Field(discriminator="kind", description="d")
    url: pydantic.AnyUrl
    http: pydantic.HttpUrl | None = None
    dsn: pydantic.PostgresDsn
    path: Path
    file: pydantic.FilePath
    secret: pydantic.SecretStr
    raw: bytes
    based: pydantic.Base64UrlBytes
    parsed: pydantic.Json[list[int]]
    size: pydantic.conint(gt=0, lt=10) = 5  # type: ignore[valid-type]
    frozen: list[int] = pydantic.Field([], json_schema_extra={"uniqueItems": False, "minItems": 0})


def test_schemas_of_pydantics_own_types_can_be_followed() -> None:
    schema = Everything.model_json_schema()
    assert refused(plain(schema)) == ""
    assert refused(plain(Everything.model_json_schema(mode="serialization"))) == ""


KEYWORDS: dict[str, Callable[[random.Random, int], Any]] = {
    "type": lambda chance, _: chance.choice(("string", "integer", "object", "array", "null", ["string", "null"])),
    "title": lambda *_: "t",
    "default": lambda *_: {"type": "nonsense"},
    "x-y": lambda *_: 1,
    "format": lambda chance, _: chance.choice(("path", "password", "x")),
    "enum": lambda chance, _: chance.choice((["a", 1, None], [[], {}, "b"])),
    "const": lambda chance, _: chance.choice(("a", {"title": 1}, [])),
    "minimum": lambda *_: 1,
    "exclusiveMaximum": lambda *_: 3,
    "minLength": lambda *_: 1,
    "uniqueItems": lambda *_: False,
    "maxItems": lambda chance, _: chance.choice((0, 1, 2)),
    "contentMediaType": lambda *_: "application/json",
    "if": lambda *_: {"type": "string"},
    "maxContains": lambda *_: 0,
    "propertyNames": lambda chance, _: chance.choice(
        ({}, {"enum": ["a", "title"]}, {"pattern": "^a"}, {"const": "a", "title": "t"}, {"type": "string"})
    ),
    "unevaluatedProperties": lambda chance, _: chance.choice((True, False, {})),
    "dependentRequired": lambda *_: {},
    "additionalProperties": lambda chance, depth: chance.choice((True, False, made(chance, depth))),
    "properties": lambda chance, depth: {name: made(chance, depth) for name in chance.sample(("a", "title", "x-y"), 2)},
    "required": lambda *_: ["a"],
    "items": lambda chance, depth: made(chance, depth),
    "prefixItems": lambda chance, depth: [made(chance, depth)],
    "anyOf": lambda chance, depth: [made(chance, depth), made(chance, depth)],
    "allOf": lambda chance, depth: [made(chance, depth)],
    "$ref": lambda chance, _: chance.choice(("#/$defs/one", "#/$defs/~0two")),
}
VALUES: list[Any] = [
    None, "", "a", "b", 0, 1, 2, 3, [], ["a"], ["a", "a"], [1, "a", None], {}, {"a": "a"}, {"a": 1, "b": 2},
    {"title": 1}, {"title": "a", "a": None}, {"x-y": 1}, {"a": {"a": 1}}, {"a": [1]}, [{}], [["a"]],
]  # fmt: skip


def made(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(sorted(KEYWORDS), chance.choice((1, 2, 4)) if depth else 1)
    return {
        name: KEYWORDS[name](chance, depth - 1) for name in names if depth or name not in ("anyOf", "allOf", "items")
    }


def test_what_is_made_plain_means_the_same() -> None:
    chance = random.Random(4)
    followed = 0
    for _ in range(1500):
        schema = made(chance, 3) | {"$defs": {"one": made(chance, 0), "~two": {"type": "string", "title": "t"}}}
        try:
            simple = plain(schema)
        except SchemaError:
            continue
        followed += 1
        assert simple == plain(simple)
        before, after = jsonschema_rs.Draft202012Validator(schema), jsonschema_rs.Draft202012Validator(simple)
        for value in VALUES:
            assert before.is_valid(value) == after.is_valid(value), (schema, simple, value)
    assert followed > 900


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        ({"type": "string", "nullable": True}, [None, "a"], [1]),
        ({"type": "string", "enum": ["a"], "nullable": True}, [None, "a"], ["b"]),
        ({"$ref": "#/$defs/s", "nullable": True, "$defs": {"s": STRING}}, [None, "a"], [1]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, [3], [2]),
        ({"type": "string", "pattern": DECIMAL}, ["-1.5", "1.", ".5", "07"], ["", "-", ".", "a", "1.5.2"]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ],
)
def test_older_and_other_ways_to_say_it_are_kept_to(
    schema: dict[str, Any], values: list[Any], others: list[Any]
) -> None:
    simple = plain(schema)
    assert refused(simple) == ""
    check = jsonschema_rs.Draft202012Validator(simple)
    assert [check.is_valid(value) for value in values + others] == [True] * len(values) + [False] * len(others)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "properties.a.uniqueItems"),
    ({"anyOf": [STRING, {"not": {}}]}, "anyOf[1].not"),
    ({"$defs": {"a b": {"if": {}, "then": {}}}}, "$defs.a b.if"),
    ({"items": {"contains": STRING}}, "items.contains"),
    ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "properties.a.$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref"),
    ({"$ref": "#"}, "$ref"),
]


@pytest.mark.parametrize(("schema", "path"), REFUSED)
def test_what_no_grammar_follows_is_refused_by_its_path(served: Engine, schema: dict[str, Any], path: str) -> None:
    function = {"name": "f", "parameters": schema}
    tool = {"type": "function", "function": function}
    places: list[tuple[str, dict[str, Any]]] = [
        ("response_format.json_schema.schema.",
         {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
        ("structured_outputs.json.", {"structured_outputs": {"json": schema, "regex": None, "json_object": False}}),
        ("tools[0].function.parameters.", {"tools": [tool], "tool_choice": "required"}),
    ]  # fmt: skip
    with served.http as client:
        for prefix, fields in places:
            body = {"model": NAME, "messages": [{"role": "user", "content": "x"}]} | fields
            answer = client.post("/v1/chat/completions", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, prefix + path)
            assert "would work" in error["message"]
        answer = client.post("/v1/responses", json={"model": NAME, "input": "x", "tool_choice": "required", "tools": [
            {"type": "function"} | function]})  # fmt: skip
        assert answer.json()["error"]["param"] == "tools[0].parameters." + path
