"""The items of an answer as they come: reasoning, messages and calls of functions, and the events that tell of them.

Knows nothing about the response around them: an event has no sequence number here. What the items are in the end does
not depend on how the answer was cut into pieces.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pilotfish_engine.server.generation import Piece
from pilotfish_engine.server.logprobs import ScoredToken, chat_logprobs
from pilotfish_engine.server.parts import CallPart, Content, Reasoning
from pilotfish_engine.server.responses.items import sealed
from pilotfish_engine.tokenizer import Tokenizer

Json = dict[str, Any]
Status = Literal["completed", "incomplete"]


class _Told:
    """An item whose text comes in one part. kind: output_text or reasoning_text. seals: its end has it sealed too."""

    def __init__(self, at: int, item: Json, kind: str, extras: Json, seals: bool = False) -> None:
        self.item = item
        self.kind = kind
        self._seals = seals
        self._part: Json = {"type": kind, "text": "", **extras}
        self._place: Json = {"item_id": item["id"], "output_index": at, "content_index": 0}
        self._event = f"response.{kind}"

    def opened(self) -> Iterator[Json]:
        item = self.item | {"status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", "output_index": self._place["output_index"], "item": item}
        yield {"type": "response.content_part.added", **self._place, "part": dict(self._part)}

    def grown(self, text: str, logprobs: list[Json] | None = None) -> Iterator[Json]:
        self._part["text"] += text
        scored = {} if logprobs is None else {"logprobs": logprobs}
        if logprobs:
            self._part["logprobs"] = self._part["logprobs"] + logprobs
        yield {"type": self._event + ".delta", **self._place, "delta": text, **scored}

    def closed(self, status: Status) -> Iterator[Json]:
        self.item |= {"status": status, "content": [self._part]}
        if self._seals:
            self.item["encrypted_content"] = sealed(self._part["text"])
        told: Json = {key: self._part[key] for key in ("text", "logprobs") if key in self._part}
        yield {"type": self._event + ".done", **self._place, **told}
        yield {"type": "response.content_part.done", **self._place, "part": self._part}
        yield {"type": "response.output_item.done", "output_index": self._place["output_index"], "item": self.item}


class _Called:
    def __init__(self, at: int, part: CallPart) -> None:
        self.index = part.index
        self.item: Json = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": part.id,
            "name": part.name,
            "arguments": "",
        }
        self._place: Json = {"item_id": self.item["id"], "output_index": at}
        self._event = "response.function_call_arguments"

    def opened(self) -> Iterator[Json]:
        item = self.item | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": self._place["output_index"], "item": item}

    def grown(self, arguments: str) -> Iterator[Json]:
        self.item["arguments"] += arguments
        yield {"type": self._event + ".delta", **self._place, "delta": arguments}

    def closed(self, status: Status) -> Iterator[Json]:
        self.item["status"] = status
        whole = {"name": self.item["name"], "arguments": self.item["arguments"]}
        yield {"type": self._event + ".done", **self._place, **whole}
        yield {"type": "response.output_item.done", "output_index": self._place["output_index"], "item": self.item}


class Output:
    """tokenizer: None where no log-probabilities are wanted. seals: reasoning has its encrypted_content too."""

    def __init__(self, tokenizer: Tokenizer | None, seals: bool = False) -> None:
        self.items: list[Json] = []
        self._tokenizer = tokenizer
        self._seals = seals
        self._open: _Told | _Called | None = None
        self._tokens: list[ScoredToken] = []  # whose text has not been told

    def feed(self, piece: Piece) -> Iterator[Json]:
        """The events of a piece; to be read to the end. The last piece closes what is open."""
        last = piece.finish_reason is not None
        self._tokens += piece.tokens
        for part in piece.parts:
            match part:
                case Reasoning(text):
                    yield from self._thought(text)
                case Content(text):
                    yield from self._said(text)
                case CallPart():
                    yield from self._called(part)
        if last:
            status: Status = "incomplete" if piece.finish_reason == "length" else "completed"
            unanswered = not self.items or (status == "completed" and self.items[-1]["type"] == "reasoning")
            if unanswered or (self._tokens and self._telling("output_text")):
                yield from self._said("", last=True)  # an answer without words; or its last token
            yield from self._close(status)

    def cut(self) -> Iterator[Json]:
        """The last events when no more pieces come."""
        yield from self._close("incomplete")

    def _said(self, text: str, last: bool = False) -> Iterator[Json]:
        if not (text or last):
            return
        if not self._telling("output_text"):
            yield from self._close("completed")
            message = {"id": _new_id("msg"), "type": "message", "status": "completed", "role": "assistant"}
            told = _Told(len(self.items), message, "output_text", {"annotations": [], "logprobs": []})
            yield from self._begin(told)
        assert isinstance(self._open, _Told), "a message is open"
        if text or self._tokens:
            yield from self._open.grown(text, self._logprobs())

    def _thought(self, text: str) -> Iterator[Json]:
        self._tokens.clear()  # they are no message's
        if not self._telling("reasoning_text"):
            yield from self._close("completed")
            reasoning = {"id": _new_id("rs"), "type": "reasoning", "status": "completed", "summary": []}
            yield from self._begin(_Told(len(self.items), reasoning, "reasoning_text", {}, self._seals))
        assert isinstance(self._open, _Told), "reasoning is open"
        yield from self._open.grown(text)

    def _telling(self, kind: str) -> bool:
        return isinstance(self._open, _Told) and self._open.kind == kind

    def _called(self, part: CallPart) -> Iterator[Json]:
        self._tokens.clear()  # they are no message's
        if part.name is not None:
            yield from self._close("completed")
            yield from self._begin(_Called(len(self.items), part))
        assert isinstance(self._open, _Called), "a call is open"
        assert self._open.index == part.index, "calls come one after the other"
        if part.arguments:
            yield from self._open.grown(part.arguments)

    def _begin(self, opened: _Told | _Called) -> Iterator[Json]:
        self._open = opened
        self.items.append(opened.item)
        yield from opened.opened()

    def _close(self, status: Status) -> Iterator[Json]:
        if self._open is not None:
            yield from self._open.closed(status)
        self._open = None

    def _logprobs(self) -> list[Json]:
        tokens, self._tokens = self._tokens, []
        return [] if self._tokenizer is None else _logprobs(tokens, self._tokenizer)


def _logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> list[Json]:
    """As a chat's, but for special tokens, whose bytes are none here instead of null."""
    entries: list[Json] = chat_logprobs(tokens, tokenizer)["content"]
    for entry in entries:
        for scored in (entry, *entry["top_logprobs"]):
            scored["bytes"] = scored["bytes"] or []
    return entries


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
