"""How answers are written down: OpenAI's objects for chat and for plain completions, whole and in chunks."""

from __future__ import annotations

import time
from typing import Any, Protocol

from pilotfish_engine.server.generation import Piece, Usage

Json = dict[str, Any]


class Shape(Protocol):
    whole_object: str
    chunk_object: str
    id_prefix: str

    def opening(self, index: int) -> Json | None:
        """The choice of a chunk before any text, if there is one."""
        ...

    def part(self, piece: Piece) -> Json: ...

    def whole(self, index: int, text: str, finish_reason: str) -> Json: ...


class Chat:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def opening(self, index: int) -> Json | None:
        return _choice(index, None, delta={"role": "assistant", "content": ""})

    def part(self, piece: Piece) -> Json:
        return _choice(piece.index, piece.finish_reason, delta={"content": piece.text} if piece.text else {})

    def whole(self, index: int, text: str, finish_reason: str) -> Json:
        return _choice(index, finish_reason, message={"role": "assistant", "content": text, "refusal": None})


class Completion:
    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def opening(self, index: int) -> Json | None:
        return None

    def part(self, piece: Piece) -> Json:
        return _choice(piece.index, piece.finish_reason, text=piece.text)

    def whole(self, index: int, text: str, finish_reason: str) -> Json:
        return _choice(index, finish_reason, text=text)


class Writer:
    """Objects of one answer: they share id, time and model name."""

    def __init__(self, shape: Shape, request_id: str, model: str) -> None:
        self.shape = shape
        self._common = {"id": shape.id_prefix + request_id, "created": int(time.time()), "model": model}

    def chunk(self, choice: Json | None) -> Json:
        return self._common | {"object": self.shape.chunk_object, "choices": [] if choice is None else [choice]}

    def whole(self, choices: list[Json], usage: Usage) -> Json:
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
        },
    }


def _choice(index: int, finish_reason: str | None, **content: Any) -> Json:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
