"""What POST /v1/responses answers, for the OpenAPI document: a subset of what OpenAI's own schema allows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pilotfish_engine.server.responses.request import Reasoning

Status = Literal["in_progress", "completed", "incomplete"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TokenAlternative(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenAlternative):
    top_logprobs: list[TokenAlternative]


class OutputText(_Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ScoredToken]


class OutputMessage(_Answer):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(_Answer):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ReasoningText(_Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(_Answer):
    """encrypted_content: where it is asked for."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: str | None = None


class IncompleteDetails(_Answer):
    reason: Literal["max_output_tokens"]


class ResponseFailure(_Answer):
    code: str
    message: str


class InputTokensDetails(_Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(_Answer):
    reasoning_tokens: int


class ResponseUsage(_Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class AsAsked(_Answer):
    """As the request had them, or what holds where it did not say."""

    instructions: str | None
    temperature: float
    top_p: float
    frequency_penalty: float
    presence_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    truncation: Literal["disabled"]
    text: dict[str, Any]
    reasoning: Reasoning
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    max_tool_calls: int | None


class About(_Answer):
    """What clients say of a request, told back; nothing is kept."""

    background: Literal[False]
    metadata: dict[str, str]
    previous_response_id: None
    prompt_cache_key: str | None
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    user: str | None


class ResponseObject(AsAsked, About):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall]
    usage: ResponseUsage | None
