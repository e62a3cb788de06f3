"""How answers are written down: OpenAI's objects for chat and for plain completions, whole and in chunks.

A shape is fed the pieces of one request's choices in order; the whole answer is what its parts add up to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pilotfish_engine.server.failures import ApiError
from pilotfish_engine.server.generation import Piece, Usage
from pilotfish_engine.server.logprobs import ScoredToken, chat_logprobs, completion_logprobs, prompt_tokens
from pilotfish_engine.server.parts import CallPart, Content, Part, Reasoning
from pilotfish_engine.tokenizer import Tokenizer

Json = dict[str, Any]


class Shape(Protocol):
    whole_object: str
    chunk_object: str
    id_prefix: str

    def opening(self, index: int) -> Json | None:
        """The choice of a chunk before any piece, if there is one."""
        ...

    def part(self, piece: Piece) -> Json | None:
        """The choice of a chunk; None when the piece shows nothing yet."""
        ...

    def whole(self, index: int) -> Json:
        """When every piece has been fed."""
        ...


class _Choice:
    """shown: how many of the tokens have been told of in chunks."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[Json] = []
        self.calls_whole = True
        self.tokens: list[ScoredToken] = []
        self.shown = 0
        self.finish_reason: str | None = None
        self.failure: ApiError | None = None

    def unshown(self) -> Sequence[ScoredToken]:
        tokens, self.shown = self.tokens[self.shown :], len(self.tokens)
        return tokens


class Chat:
    """Reasoning is `reasoning_content`, as DeepSeek, vLLM and SGLang name it."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, tokenizer: Tokenizer | None, size: int) -> None:
        """tokenizer: None where no log-probabilities are wanted."""
        self._tokenizer = tokenizer
        self._choices = [_Choice() for _ in range(size)]

    def opening(self, index: int) -> Json:
        return _choice(index, None, None, delta={"role": "assistant", "content": ""})

    def part(self, piece: Piece) -> Json | None:
        choice = self._choices[piece.index]
        choice.tokens += piece.tokens
        choice.finish_reason, choice.failure = piece.finish_reason, piece.failure
        delta = self._delta(choice, piece.parts)
        if choice.calls and choice.calls_whole and piece.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        if not delta and piece.finish_reason is None:
            return None
        return _choice(piece.index, choice.finish_reason, self._logprobs(choice.unshown()), piece.failure, delta=delta)

    def _delta(self, choice: _Choice, parts: Sequence[Part]) -> Json:
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        choice.text += content
        choice.reasoning += reasoning
        delta: Json = {"reasoning_content": reasoning} if reasoning else {}
        if content:
            delta["content"] = content
        calls = [part for part in parts if isinstance(part, CallPart)]
        if calls:
            choice.calls_whole = calls[-1].whole
            delta["tool_calls"] = [_call_delta(choice.calls, part) for part in calls]
        return delta

    def whole(self, index: int) -> Json:
        choice = self._choices[index]
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls or choice.reasoning:
            message["content"] = choice.text or None
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = choice.calls
        return _choice(index, choice.finish_reason, self._logprobs(choice.tokens), choice.failure, message=message)

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> Json | None:
        return None if self._tokenizer is None else chat_logprobs(tokens, self._tokenizer)


@dataclass(frozen=True)
class Echo:
    """A prompt that stands before its answer."""

    text: str
    token_ids: Sequence[int]


class Completion:
    """echoes: for each choice what stands before its answer, or None."""

    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, tokenizer: Tokenizer | None, echoes: Sequence[Echo | None]) -> None:
        """tokenizer: None where no log-probabilities are wanted."""
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._choices = [_Choice() for _ in echoes]

    def opening(self, index: int) -> Json | None:
        echo = self._echoes[index]
        return None if echo is None else _choice(index, None, None, text=echo.text)

    def part(self, piece: Piece) -> Json | None:
        choice = self._choices[piece.index]
        choice.tokens += self._tokens(piece)
        choice.text += piece.text
        choice.finish_reason, choice.failure = piece.finish_reason, piece.failure
        if not piece.text and piece.finish_reason is None:
            return None
        logprobs = self._logprobs(choice.unshown())
        return _choice(piece.index, piece.finish_reason, logprobs, piece.failure, text=piece.text)

    def whole(self, index: int) -> Json:
        choice = self._choices[index]
        echo = self._echoes[index]
        text = choice.text if echo is None else echo.text + choice.text
        return _choice(index, choice.finish_reason, self._logprobs(choice.tokens), choice.failure, text=text)

    def _tokens(self, piece: Piece) -> list[ScoredToken]:
        """With the echo's before them, whose text comes first."""
        echo = self._echoes[piece.index]
        if echo is None or self._tokenizer is None:
            return list(piece.tokens)
        prompt = [] if piece.prompt is None else prompt_tokens(echo.token_ids, piece.prompt, echo.text, self._tokenizer)
        return prompt + [replace(token, offset=token.offset + len(echo.text)) for token in piece.tokens]

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> Json | None:
        return None if self._tokenizer is None else completion_logprobs(tokens, self._tokenizer)


class Writer:
    """Objects of one answer: they share id, time, model name and what the model was."""

    def __init__(self, shape: Shape, request_id: str, model: str, fingerprint: str) -> None:
        self.shape = shape
        self._common = {
            "id": shape.id_prefix + request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def chunk(self, choice: Json | None) -> Json:
        return self._common | {"object": self.shape.chunk_object, "choices": [] if choice is None else [choice]}

    def whole(self, size: int, usage: Usage) -> Json:
        choices = [self.shape.whole(index) for index in range(size)]
        return self._common | {"object": self.shape.whole_object, "choices": choices, "usage": usage_json(usage)}


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
        },
    }


def _choice(
    index: int, finish_reason: str | None, logprobs: Json | None, failure: ApiError | None = None, **content: Any
) -> Json:
    told: Json = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
    return told if failure is None else told | failure.body


def _call_delta(calls: list[Json], part: CallPart) -> Json:
    """Writes a part of a call down among the `calls`, and returns it as a chunk tells it."""
    if part.name is None:
        calls[part.index]["function"]["arguments"] += part.arguments
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    call = {"id": part.id, "type": "function", "function": function}
    calls.append(call)
    return {"index": part.index, **call, "function": dict(function)}
