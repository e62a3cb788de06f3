"""The bodies of requests, as OpenAI defines them: every field is served, refused by name, or ignored.

Knows nothing about the loaded model: what depends on its limits, `generation` checks.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from pilotfish_engine.contract.speculation import EnvelopeUpdate
from pilotfish_engine.messages import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, Grammar
from pilotfish_engine.server.body import Body
from pilotfish_engine.server.conversation import MAX_TOOLS, Message, NamedTool, Tool, ToolChoice, check_tools
from pilotfish_engine.server.structure import ResponseFormat, StructuredOutputs
from pilotfish_engine.server.text import JsonObject, Text, well_formed
from pilotfish_engine.server.unserved import IN_CHATS, IN_COMPLETIONS

MAX_CHOICES = 128  # prompts times n of one request
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_TOKENS = 1 << 24

_TOKEN_KEY = r"^(0|[1-9][0-9]{0,8})$"

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: Any) -> Any:
    """OpenAI's four forms of a prompt as one: a list of texts and of lists of token ids."""
    prompts = [value] if isinstance(value, str) or _is_token_list(value) else value
    usable = isinstance(prompts, list) and all(isinstance(p, str) or _is_token_list(p) for p in prompts)
    if not usable or not 0 < len(prompts) <= MAX_CHOICES:
        raise PydanticCustomError(
            "prompt",
            "a text, a list of token ids, or a list of 1 to {most} of either would work",
            {"most": MAX_CHOICES},
        )
    for prompt in prompts:
        if isinstance(prompt, str):
            well_formed(prompt)
    return prompts


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(token) is int for token in value)


def _keys_are_tokens(value: dict[str, float]) -> dict[str, float]:
    foreign = next((key for key in value if not re.match(_TOKEN_KEY, key)), None)
    if foreign is not None:
        raise PydanticCustomError(
            "token", "its keys are token ids, and {key} is none; '42' would work", {"key": repr(foreign[:40])}
        )
    return value


Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenIds = Annotated[list[int], Field(min_length=1)]
SeveralPrompts = Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
Prompts = Annotated[
    list[str | list[int]], PlainValidator(_as_prompts, json_schema_input_type=str | TokenIds | SeveralPrompts)
]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"propertyNames": {"pattern": _TOKEN_KEY}}),
    AfterValidator(_keys_are_tokens),
]


class StreamOptions(Body):
    """continuous_usage_stats: usage so far in every chunk. include_obfuscation: chunks are filled up, so that their
    sizes do not tell what is in them."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Drawing(Body):
    """How each token is drawn. top_k, min_p and repetition_penalty are not OpenAI's, but widely sent."""

    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    logit_bias: Bias | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)


class About(Body):
    """What clients say of a request beside what they ask: accepted and kept nowhere."""

    user: Text | None = None
    metadata: dict[Text, Text] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None


class Sampling(Drawing, About):
    """What every route that generates has in common. min_tokens, ignore_eos, stop_token_ids, priority (the lowest
    first) and structured_outputs are not OpenAI's, but widely sent."""

    model: Text
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    stop: Annotated[Stops, BeforeValidator(_as_list, json_schema_input_type=Stop | Stops)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "needs stream: true")
        return self


class Generate(Sampling):
    """What /v1/chat/completions and /v1/completions have in common."""

    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        if self.structured_outputs is not None and self.answer_format is not None:
            raise _wrong("structured_outputs", "and response_format exclude each other; one of them would work")
        return self

    @property
    def answer_format(self) -> Grammar | None:
        return None if self.response_format is None else self.response_format.grammar()

    @property
    def alternatives(self) -> int | None:
        """How many are wanted beside each token's log-probability; None: not even that."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of the prompt's tokens are wanted too."""
        return False


class ChatRequest(Generate):
    """chat_template_kwargs: variables for the chat template, such as enable_thinking."""

    unserved = IN_CHATS

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _chat_fields_fit_each_other(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _wrong("top_logprobs", "needs logprobs: true")
        check_tools(self.tools or [], self.tool_choice)
        if self.offered_tools and self.structured_outputs is not None:
            raise _wrong("structured_outputs", "excludes calls of tools; tool_choice 'none' would work")
        if self.offered_tools and self.choice != "auto" and self.answer_format is not None:
            raise _wrong("response_format", "excludes a call that is required; tool_choice 'auto' would work")
        return self

    @property
    def variables(self) -> dict[str, Any]:
        """Of the chat template."""
        return _variables(self.reasoning_effort, self.chat_template_kwargs)

    @property
    def choice(self) -> Literal["none", "auto", "required"] | NamedTool:
        return self.tool_choice or "auto"

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.choice == "none" else self.tools or []

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generate):
    """best_of: as many as n, for the best of more would have to be found among hidden ones."""

    unserved = IN_COMPLETIONS

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    @model_validator(mode="after")
    def _completion_fields_fit_each_other(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _wrong("best_of", f"is served where it equals n; {self.n or 1} would work")
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


class TokenizeRequest(Body):
    """prompt as in /v1/completions, or messages and what goes with them as in /v1/chat/completions."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "or messages is needed, and not both")
        return self

    @property
    def variables(self) -> dict[str, Any]:
        """Of the chat template."""
        return _variables(self.reasoning_effort, self.chat_template_kwargs)


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]


class SpeculationUpdate(EnvelopeUpdate):
    """PUT /v1/speculation. Numbers are numbers here: "3" and true are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _variables(effort: ReasoningEffort | None, said: dict[str, Any] | None) -> dict[str, Any]:
    """The effort by the names that templates have for it, and what the client says itself. enable_thinking: Qwen3,
    GLM-4.5, SmolLM3; thinking: DeepSeek-V3.1, Granite 3, Kimi K2.5, which are off by default; thinking_budget:
    Seed-OSS; reasoning_effort: gpt-oss."""
    meant: dict[str, Any] = {}
    if effort == "none":
        meant = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
    elif effort is not None:
        meant = {"enable_thinking": True, "thinking": True, "reasoning_effort": effort}
    return meant | (said or {})


def _wrong(field: str, sentence: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{sentence}", {"field": field, "sentence": sentence})
