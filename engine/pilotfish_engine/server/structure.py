"""What an answer's text must be: OpenAI's response_format and vLLM's structured_outputs, as the engine's grammars.

Whether a grammar can be compiled only the model process knows.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from pilotfish_engine.messages import Grammar
from pilotfish_engine.server.body import Body, Unserved
from pilotfish_engine.server.schemas import SchemaError, plain
from pilotfish_engine.server.text import JsonObject, Text

MAX_CHOICES = 1024

_REGEX_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


def _usable(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        plain(schema)
    except SchemaError as error:
        raise PydanticCustomError(
            "field", "{sentence}", {"field": error.path, "sentence": error.sentence}
        ) from error
    return schema


Schema = Annotated[JsonObject, AfterValidator(_usable)]


class JsonSchema(Body):
    """strict: every schema is kept to, whatever it says."""

    name: Text | None = None
    description: Text | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PydanticCustomError(
                "field", "is required with the type json_schema, and belongs to no other", {"field": "json_schema"}
            )
        return self

    def grammar(self) -> Grammar | None:
        if self.json_schema is not None:
            return Grammar("json_schema", json.dumps(plain(self.json_schema.schema_)))
        return Grammar("json_object") if self.type == "json_object" else None


class StructuredOutputs(Body):
    """One of these. choice: the texts that an answer may be. grammar: GBNF or Lark."""

    unserved = Unserved(
        {
            "disable_additional_properties": (None, False),
            "disable_any_whitespace": (None, False),
            "structural_tag": (None,),
            "whitespace_pattern": (None,),
        },
        {"disable_fallback": (None, False)},
    )

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: list[Annotated[Text, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: Text | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise PydanticCustomError(
                "structure", "exactly one of json, json_object, regex, choice and grammar would work"
            )
        return self

    def as_grammar(self) -> Grammar | None:
        if self.json_ is not None:
            return Grammar("json_schema", json.dumps(plain(self.json_)))
        if self.json_object:
            return Grammar("json_object")
        if self.choice is not None:
            return Grammar("regex", "|".join(_REGEX_SYNTAX.sub(r"\\\g<0>", text) for text in self.choice))
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return None if self.grammar is None else Grammar("ebnf", self.grammar)
