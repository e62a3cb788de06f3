"""The response object and the events of its stream, from what a generation brings.

The stream's last event holds the object that a request without a stream gets.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from pilotfish_engine.messages import FinishReason
from pilotfish_engine.server.body import Body
from pilotfish_engine.server.delivery import Pieces
from pilotfish_engine.server.failures import ApiError
from pilotfish_engine.server.generation import Generation, Piece, Usage
from pilotfish_engine.server.responses.output import Output
from pilotfish_engine.server.responses.request import ResponsesRequest
from pilotfish_engine.server.streaming import Event, obfuscated

Json = dict[str, Any]


class Answer:
    """One response. in_own_words: makes of a chat's error one of this API."""

    def __init__(
        self,
        body: ResponsesRequest,
        response_id: str,
        model: str,
        output: Output,
        in_own_words: Callable[[ApiError], ApiError],
    ) -> None:
        self._output = output
        self._in_own_words = in_own_words
        self._obfuscates = body.stream_options is not None and bool(body.stream_options.include_obfuscation)
        self._sequence_number = 0
        self._response: Json = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            **_as_asked(body),
        }

    async def whole(self, generation: Generation) -> Json:
        """Raises ApiError."""
        reason: FinishReason | None = None
        async for piece in generation.pieces():
            for _ in self._output.feed(piece):
                pass
            reason = piece.finish_reason
        return self._ended(reason, generation.usage())

    async def events(self, generation: Generation, first: Piece, pieces: Pieces) -> AsyncGenerator[bytes | Event, None]:
        """An error among the pieces becomes the last two events: the status was sent long ago."""
        yield self._event({"type": "response.created", "response": self._response})
        yield self._event({"type": "response.in_progress", "response": self._response})
        reason = first.finish_reason
        try:
            for event in self._output.feed(first):
                yield self._event(event)
            async for piece in pieces:
                for event in self._output.feed(piece):
                    yield self._event(event)
                reason = piece.finish_reason
        except ApiError as error:
            for event in self._output.cut():
                yield self._event(event)
            told = self._in_own_words(error)
            yield self._event({"type": "error", "code": told.code, "message": told.message, "param": told.param})
            yield self._event({"type": "response.failed", "response": self._failed(told, generation.usage())})
        else:
            response = self._ended(reason, generation.usage())
            yield self._event({"type": f"response.{response['status']}", "response": response})

    def _ended(self, reason: FinishReason | None, usage: Usage) -> Json:
        short = reason == "length"
        return self._response | {
            "completed_at": None if short else int(time.time()),
            "status": "incomplete" if short else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "output": self._output.items,
            "usage": _usage(usage),
        }

    def _failed(self, error: ApiError, usage: Usage) -> Json:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        return self._response | {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "output": self._output.items,
            "usage": _usage(usage),
        }

    def _event(self, event: Json) -> Event:
        numbered = event | {"sequence_number": self._sequence_number}
        self._sequence_number += 1
        filled = self._obfuscates and event["type"].endswith(".delta")
        return Event(event["type"], obfuscated(numbered) if filled else msgspec.json.encode(numbered))


def _as_asked(body: ResponsesRequest) -> Json:
    """What a response repeats of its request, and what it got where the request left it open."""
    form = None if body.text is None or body.text.format is None else body.text.format
    effort = None if body.reasoning is None else body.reasoning.effort
    choice = body.tool_choice or "auto"
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "frequency_penalty": body.frequency_penalty or 0.0,  # these two are Open Responses' alone
        "presence_penalty": body.presence_penalty or 0.0,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if form is None else _shown(form), "verbosity": "medium"},
        "tool_choice": choice if isinstance(choice, str) else _shown(choice),
        "tools": [{"parameters": None, "strict": None} | _shown(tool) for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _shown(part: Body) -> Json:
    return part.model_dump(by_alias=True, exclude_unset=True)


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
