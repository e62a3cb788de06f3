"""The bodies of requests, as OpenAI defines them: every field is served, refused by name, or unknown.

Knows nothing about the loaded model: what depends on its limits, `generation` checks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from pilotfish_engine.contract.speculation import EnvelopeUpdate
from pilotfish_engine.server.unserved import IN_MESSAGES, IN_REQUESTS, without_unserved

MAX_CHOICES = 128  # prompts times n of one request
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 128
MAX_TOKENS = 1 << 24

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_of(value: Any) -> Any:
    """A message's content: a text, or a list of text parts, which are joined."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise PydanticCustomError(
                "parts", "only parts of type text are served, such as {{'type': 'text', 'text': …}}"
            )
    return "".join(part["text"] for part in value)


def _well_formed(text: str) -> str:
    """JSON can escape half a surrogate pair, which is no text."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise PydanticCustomError("surrogate", "half a surrogate pair is no character; whole ones would work")
    return text


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
            _well_formed(prompt)
    return prompts


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(token) is int for token in value)


def _as_threshold(value: Any) -> Any:
    if value not in ("Auto", None) and (type(value) is not int or value < 1):
        raise PydanticCustomError("threshold", "'Auto' or a number of running requests from 1 would work")
    return value


Text = Annotated[str, AfterValidator(_well_formed)]
Content = Annotated[Text, BeforeValidator(_text_of)]
Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Prompts = Annotated[list[str | list[int]], PlainValidator(_as_prompts)]


class StreamOptions(_Body):
    include_usage: bool | None = None


class Generate(_Body):
    """What /v1/chat/completions and /v1/completions have in common. top_k, min_p, ignore_eos and stop_token_ids are
    not OpenAI's, but widely sent. user, metadata and the like are accepted and kept nowhere."""

    model: Text
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[Stop], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, body: Any) -> Any:
        return without_unserved(body, IN_REQUESTS)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("field", "needs stream: true", {"field": "stream_options"})
        return self


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, body: Any) -> Any:
        return without_unserved(body, IN_MESSAGES)

    @property
    def for_template(self) -> dict[str, str]:
        """Templates know the role developer by its old name."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(Generate):
    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)


class CompletionRequest(Generate):
    prompt: Prompts


class TokenizeRequest(_Body):
    """prompt as in /v1/completions, or messages as in /v1/chat/completions."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("field", "or messages is needed, and not both", {"field": "prompt"})
        return self


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[TokenId]


class SpeculationUpdate(EnvelopeUpdate):
    """PUT /v1/speculation. Numbers are numbers here: "3" and true are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    disable_threshold: Annotated[Literal["Auto"] | int | None, PlainValidator(_as_threshold)] = None
