"""What POST /v1/responses tells, held to the official client's types: nothing missing, nothing more, all in order."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.engine.server.serving import NAME, Engine

Json = dict[str, Any]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# what OpenAI answers and its client does not know, or knows in newer releases
MORE = {"store", "bytes", "name", "obfuscation", "frequency_penalty", "presence_penalty"}
ANEW = {"id", "call_id", "item_id", "created_at", "completed_at", "cached_tokens"}  # in every answer


def post(engine: Engine, **fields: Any) -> httpx.Response:
    with engine.http as client:
        body = json.dumps({"model": NAME} | fields)  # escapes half a surrogate pair too
        return client.post("/v1/responses", content=body, headers={"content-type": "application/json"})


def whole(engine: Engine, **fields: Any) -> Json:
    answer = post(engine, **fields)
    assert answer.status_code == 200, answer.text
    known_only(Response.model_validate_json(answer.content, strict=True))
    told: Json = answer.json()
    return told


def events(engine: Engine, **fields: Any) -> list[Json]:
    answer = post(engine, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read(answer.text)


def read(text: str) -> list[Json]:
    """The events of a stream's text."""
    told: list[Json] = []
    for lines in text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        known_only(EVENTS.validate_json(data.removeprefix("data: "), strict=True))
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + told[-1]["type"]
    return told


def known_only(told: BaseModel) -> None:
    """Raises AssertionError where a model has a field that its class does not."""
    assert not told.model_extra or told.model_extra.keys() <= MORE, (type(told), told.model_extra)
    for name in type(told).model_fields:
        value = getattr(told, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                known_only(part)


def heard(told: list[Json]) -> Json:
    """The response that a stream's events add up to; every event must stand where it belongs."""
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    created, in_progress, *between, last = told
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert created["response"] | {"status": "in_progress", "output": [], "usage": None} == created["response"]
    if between and between[-1]["type"] == "error":
        between.pop()
    items: list[Json] = []
    while between:
        between = _item(between, items)
    assert last["response"]["output"] == items
    assert last["type"] == "response." + last["response"]["status"]
    assert {key for key, value in created["response"].items() if last["response"][key] != value} <= {
        "status", "output", "usage", "completed_at", "incomplete_details", "error"
    }  # fmt: skip
    response: Json = last["response"]
    return response


def _item(told: list[Json], items: list[Json]) -> list[Json]:
    """Reads the events of one item, and returns those after it."""
    added = told[0]
    assert added["type"] == "response.output_item.added"
    assert (added["output_index"], added["item"]["status"]) == (len(items), "in_progress")
    end = next(at for at, event in enumerate(told) if event["type"] == "response.output_item.done")
    done, inner = told[end], told[1:end]
    assert done["output_index"] == len(items)
    assert all((e["item_id"], e["output_index"]) == (done["item"]["id"], len(items)) for e in inner)
    kind = done["item"]["type"]
    if kind == "function_call":
        *deltas, finished = inner
        assert {event["type"] for event in deltas} <= {"response.function_call_arguments.delta"}
        assert finished["type"] == "response.function_call_arguments.done"
        assert "".join(event["delta"] for event in deltas) == finished["arguments"] == done["item"]["arguments"]
        assert added["item"] | {"arguments": "", "status": done["item"]["status"]} == done["item"] | {"arguments": ""}
    else:
        _text(inner, done["item"], "output_text" if kind == "message" else "reasoning_text")
        assert added["item"] | {"content": [], "status": "in_progress"} == added["item"]
        shown = {key: value for key, value in done["item"].items() if key != "encrypted_content"}
        assert shown | {"content": [], "status": "in_progress"} == added["item"]
    items.append(done["item"])
    return told[end + 1 :]


def _text(inner: list[Json], item: Json, kind: str) -> None:
    begun, *deltas, finished, ended = inner
    assert all(event["content_index"] == 0 for event in inner)
    assert (begun["type"], ended["type"]) == ("response.content_part.added", "response.content_part.done")
    assert {event["type"] for event in deltas} <= {f"response.{kind}.delta"}
    assert finished["type"] == f"response.{kind}.done"
    assert begun["part"] | {"type": kind, "text": ""} == begun["part"]
    assert "".join(event["delta"] for event in deltas) == finished["text"] == ended["part"]["text"]
    if kind == "output_text":
        scored = [entry for event in deltas for entry in event["logprobs"]]
        assert scored == finished["logprobs"] == ended["part"]["logprobs"]
    assert item["content"] == [ended["part"]]


def same(told: Any) -> Any:
    """An answer without what is new in every answer."""
    if isinstance(told, dict):
        return {key: same(value) for key, value in told.items() if key not in ANEW}
    return [same(part) for part in told] if isinstance(told, list) else told


def both(engine: Engine, **fields: Any) -> Json:
    """The answer, which is the same whole and streamed."""
    told = whole(engine, **fields)
    assert same(heard(events(engine, **fields))) == same(told)
    return told


def text_of(response: Json) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])
