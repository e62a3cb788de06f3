"""Answers without a model: what a request asks for, filled in by rule.

Knows OpenAI's requests and nothing of HTTP: a call where a tool may be called and was not yet, an instance of the
schema where one is given, else a fixed sentence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

SENTENCE = "Hello there, how are you?"
TOO_LONG = 4000  # characters


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    text: str
    calls: tuple[Call, ...] = ()

    @property
    def tokens(self) -> list[str]:
        """The text in pieces that add up to it."""
        return [piece if i == 0 else " " + piece for i, piece in enumerate(self.text.split(" "))]


def of_chat(body: Json) -> Answer:
    return _answer(
        [tool["function"] for tool in body.get("tools") or []],
        body.get("tool_choice") or "auto",
        _called(body["messages"]),
        body.get("parallel_tool_calls") is not False,
        _schema_of(body.get("response_format") or {}),
    )


def of_response(body: Json) -> Answer:
    items = body["input"] if isinstance(body["input"], list) else []
    return _answer(
        [tool for tool in body.get("tools") or [] if tool["type"] == "function"],
        body.get("tool_choice") or "auto",
        [item["name"] for item in items if item.get("type") == "function_call"],
        body.get("parallel_tool_calls") is not False,
        _schema_of((body.get("text") or {}).get("format") or {}),
    )


def is_too_long(body: Json) -> bool:
    said = [body.get("prompt"), body.get("input"), [message.get("content") for message in body.get("messages", [])]]
    return len(json.dumps(said)) > TOO_LONG


def shows_pictures(body: Json) -> bool:
    said = json.dumps([body.get("messages"), body.get("input")])
    return '"image_url"' in said or '"input_image"' in said


def _called(messages: list[Json]) -> list[str]:
    return [call["function"]["name"] for message in messages for call in message.get("tool_calls") or []]


def _schema_of(form: Json) -> Json | None:
    if form.get("type") == "json_object":
        return {"type": "object", "properties": {"answer": {"type": "integer"}}}
    schema: Json | None = form.get("schema") or form.get("json_schema", {}).get("schema")
    return schema


def _answer(tools: list[Json], choice: Any, called: list[str], several: bool, schema: Json | None) -> Answer:
    """called: which tools the conversation has called already."""
    left = [tool for tool in tools if tool["name"] not in called]
    if isinstance(choice, dict):
        name = choice.get("name") or choice["function"]["name"]
        wanted = [tool for tool in tools if tool["name"] == name]
    elif choice == "required":
        wanted = (left or tools[-1:])[:1]
    else:
        wanted = [] if choice == "none" or called else left[: None if several else 1]
    if wanted:
        return Answer("", tuple(_call(i, tool, len(called)) for i, tool in enumerate(wanted)))
    return Answer(SENTENCE if schema is None else json.dumps(instance(schema, schema)))


def _call(index: int, tool: Json, before: int) -> Call:
    parameters = tool.get("parameters") or {}
    return Call(f"call_{before + index}", tool["name"], json.dumps(instance(parameters, parameters)))


def instance(schema: Json, root: Json) -> Any:
    """A value that a schema of the kind that clients write allows."""
    if "$ref" in schema:
        return instance(_at(schema["$ref"], root), root)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return instance(schema[key][0], root)
    kind = schema.get("type", "object")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            return {name: instance(inner, root) for name, inner in schema.get("properties", {}).items()}
        case "array":
            return [instance(schema.get("items", {}), root)] * max(1, schema.get("minItems", 1))
        case "string":
            return {"date": "2026-01-31", "email": "a@example.org"}.get(schema.get("format", ""), "text")
        case "integer" | "number":
            return schema.get("minimum", 3)
        case "boolean":
            return True
    return None


def _at(reference: str, root: Json) -> Json:
    found = root
    for key in reference.removeprefix("#/").split("/"):
        found = found[key]
    return found
