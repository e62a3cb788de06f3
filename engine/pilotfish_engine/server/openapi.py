"""The OpenAPI document: what FastAPI sees of requests, and here what the routes answer, which it cannot see.

A schema fuzzer holds the engine to it; what is not written down here, no route answers.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from pilotfish_engine.contract.speculation import CostProfile, EngineReport
from pilotfish_engine.server.bodies import SpeculationUpdate
from pilotfish_engine.server.responses.schema import ResponseObject

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


_CHUNKS: Json = {"type": "string"}  # one chunk each, the last is [DONE]
_NAMED: Json = {  # named, the last response.completed, .incomplete or .failed
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_GENERATING = (400, 401, 404, 408, 413, 500, 503)
_READING = (401, 404, 503)
_CHANGING = (400, 401, 403, 408, 413, 503)

# method and path: what a 200 is (None: text), and the statuses of errors
ROUTES: dict[tuple[str, str], tuple[type[BaseModel] | None, tuple[int, ...]]] = {
    ("post", "/v1/chat/completions"): (ChatCompletion, _GENERATING),
    ("post", "/v1/completions"): (Completion, _GENERATING),
    ("post", "/v1/responses"): (ResponseObject, _GENERATING),
    ("get", "/v1/models"): (Models, (401,)),
    ("get", "/v1/models/{name}"): (Model, (401, 404)),
    ("post", "/tokenize"): (Tokens, _GENERATING),
    ("post", "/detokenize"): (Detokenized, _GENERATING),
    ("get", "/health"): (Probe, ()),
    ("get", "/ready"): (Probe, ()),
    ("get", "/metrics"): (None, ()),
    ("get", "/v1/speculation"): (EngineReport, (503,)),
    ("put", "/v1/speculation"): (EngineReport, _CHANGING),
    ("get", "/v1/profile"): (CostProfile, (404, 503)),
    ("post", "/flush_cache"): (Flushed, _CHANGING),
}
_STREAMED = {"/v1/chat/completions": _CHUNKS, "/v1/completions": _CHUNKS, "/v1/responses": _NAMED}
_PROBES = ("/health", "/ready")
_TOKEN_NEEDED = (("put", "/v1/speculation"), ("post", "/flush_cache"))
_MEANINGS = {
    200: "Done",
    400: "The request's fault; param names the field",
    401: "The key or token is missing or wrong",
    403: "The engine was started without an admin token",
    404: "There is no such model or thing",
    408: "The body was not complete in time",
    413: "The body is too large",
    500: "The engine gave the request up",
    503: "Not now",
}


def describe(app: FastAPI, model: str, with_key: bool) -> Json:
    """model: the name of the one that is served. with_key: whether the API asks for one."""
    document = FastAPI.openapi(app)
    answers: list[type[BaseModel]] = [Error]
    answers += [kind for kind, _ in ROUTES.values() if kind is not None and kind not in answers]
    _, schemas = models_json_schema(
        [*((kind, "serialization") for kind in answers), (SpeculationUpdate, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    components = document["components"]
    components["schemas"] = {
        name: schema
        for name, schema in (components["schemas"] | schemas["$defs"]).items()
        if name not in ("HTTPValidationError", "ValidationError")
    }
    for schema in components["schemas"].values():
        if "Request" in schema["title"]:
            optional = [] if "model" in schema.get("required", ()) else [None]
            schema["properties"]["model"] = {"enum": [model, *optional]}
    components["securitySchemes"] = {name: {"type": "http", "scheme": "bearer"} for name in ("apiKey", "adminToken")}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = _responses(method, path)
            if 401 in ROUTES[method, path][1]:
                admin = (method, path) in _TOKEN_NEEDED
                if admin or with_key:
                    operation["security"] = [{"adminToken" if admin else "apiKey": []}]
    document["paths"]["/v1/speculation"]["put"]["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": _reference(SpeculationUpdate)}},
    }
    return document


def methods(path: str) -> str:
    """Of a path, as the header Allow lists them; empty for one that does not exist."""
    return ", ".join(sorted(method.upper() for method, known in ROUTES if known == path))


def _responses(method: str, path: str) -> Json:
    kind, errors = ROUTES[method, path]
    content: Json = {"application/json": {"schema": _reference(kind)}} if kind else {"text/plain": {}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": _STREAMED[path]}
    responses = {"200": {"description": _MEANINGS[200], "content": content}}
    if path in _PROBES:
        responses["503"] = {"description": _MEANINGS[503], "content": content}
    for status in errors:
        responses[str(status)] = {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": _reference(Error)}},
        }
    if 503 in errors:
        responses["503"]["headers"] = {"Retry-After": {"schema": {"type": "string"}, "required": True}}
    return responses


def _reference(kind: type[BaseModel]) -> Json:
    """Not bare: schemathesis 4.32 takes a bare reference apart, and knows no prefixItems when it does."""
    return {"allOf": [{"$ref": f"#/components/schemas/{kind.__name__}"}]}
