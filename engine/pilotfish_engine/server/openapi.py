"""What the routes answer, in types: each route declares its own of them, and FastAPI makes the OpenAPI document.

A schema fuzzer holds the engine to it; what is not declared, no route answers.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict

from pilotfish_engine.server.bodies import SpeculationUpdate

Json = dict[str, Any]
FinishReason = Literal["stop", "length", "tool_calls", "error"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Error(_Answer):
    """OpenAI's form; param: the field at fault."""

    error: ErrorDetail


class CachedTokens(_Answer):
    cached_tokens: int


class PredictedTokens(_Answer):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictedTokens


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprob]
    refusal: None


class CallOfFunction(_Answer):
    name: str
    arguments: str


class AnsweredCall(_Answer):
    id: str
    type: Literal["function"]
    function: CallOfFunction


class AnsweredMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(_Answer):
    """error: why this one of several failed, where finish_reason is error."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    error: ErrorDetail | None = None


class _Generated(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    error: ErrorDetail | None = None


class Completion(_Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class Models(_Answer):
    object: Literal["list"]
    data: list[Model]


class Tokens(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(_Answer):
    prompt: str


class Probe(_Answer):
    """reason: why the answer is 503."""

    status: Literal["ok", "unavailable"]
    reason: str | None = None


class Flushed(_Answer):
    flushed: Literal[True]


CHUNKS: Json = {"type": "string"}  # one chunk each, the last is [DONE]
NAMED: Json = {  # named, the last response.completed, .incomplete or .failed
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
GENERATING = (400, 401, 404, 408, 413, 500, 503)
CHANGING = (400, 401, 403, 408, 413, 503)
API_KEY = Security(HTTPBearer(scheme_name="apiKey", auto_error=False))  # said here, and checked by the gate
ADMIN_TOKEN = Security(HTTPBearer(scheme_name="adminToken", auto_error=False))  # checked by the route
_MEANINGS = {
    400: "The request's fault; param names the field",
    401: "The key or token is missing or wrong",
    403: "The engine was started without an admin token",
    404: "There is no such model or thing",
    408: "The body was not complete in time",
    413: "The body is too large",
    500: "The engine gave the request up",
    503: "Not now",
}


def answers(kind: type[BaseModel], *errors: int, streamed: Json | None = None) -> dict[int | str, Json]:
    """Declare what a route answers, for FastAPI's `responses`. streamed: the schema of one event, where it streams."""
    done: Json = {"model": kind, "description": "Done"}
    if streamed is not None:
        done["content"] = {"text/event-stream": {"schema": streamed}}
    found: dict[int | str, Json] = {200: done}
    for status in errors:
        found[status] = {"model": Error, "description": _MEANINGS[status]}
    if 503 in errors:
        found[503]["headers"] = {"Retry-After": {"schema": {"type": "string"}, "required": True}}
    return found


PROBED: dict[int | str, Json] = {
    200: {"model": Probe, "description": "Yes"},
    503: {"model": Probe, "description": _MEANINGS[503]},
}
UPDATED = {"requestBody": {
    "required": True, "content": {"application/json": {"schema": SpeculationUpdate.model_json_schema()}},
}}  # fmt: skip


def describe(app: FastAPI, model: str) -> Json:
    """Returns FastAPI's document with the name of the one model that is served. The 422, which no route answers, is
    left out."""
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for answer in operation["responses"].values():
                for media in answer["content"].values():
                    if "$ref" in media["schema"]:  # schemathesis 4 takes a bare one apart and then knows no prefixItems
                        media["schema"] = {"allOf": [media["schema"]]}
    for schema in schemas.values():
        if "Request" in schema["title"]:
            optional = [] if "model" in schema.get("required", ()) else [None]
            schema["properties"]["model"] = {"enum": [model, *optional]}
    return document
