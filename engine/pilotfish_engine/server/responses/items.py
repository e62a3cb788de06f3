"""Reads a conversation as the Responses API writes it into messages of a chat.

Knows nothing about the rest of a request.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from pilotfish_engine.server.body import Body, Unserved
from pilotfish_engine.server.conversation import MAX_TOOLS, CalledFunction, Message, ToolCall
from pilotfish_engine.server.text import Text, well_formed

MAX_ITEMS = 4095  # with the instructions they are as many messages as a chat may have

_SAID = ("input_text", "output_text", "text", "refusal")
_THOUGHT = ("reasoning_text", "summary_text", "text")


class Part(Body):
    """A text of an item. annotations and logprobs belong to an answer's own text, and say nothing to a model."""

    unserved = Unserved(silent=frozenset({"annotations", "logprobs"}))

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: Text | None = None
    refusal: Text | None = None

    @property
    def said(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text


def _parts(value: Any) -> Any:
    """A text, or a list of parts with texts."""
    if isinstance(value, str):
        return well_formed(value)
    if value is not None and not isinstance(value, list):
        raise PydanticCustomError("content", "a text or a list of parts with texts would work")
    return None if value is None else [_part(part) for part in value]


def _part(value: Any) -> Part:
    kind = value.get("type") if isinstance(value, dict) else None
    known = tuple(dict.fromkeys((*_SAID, *_THOUGHT)))
    if not isinstance(kind, str) or kind not in known:
        raise PydanticCustomError(
            "parts",
            "a part of type {kind} is not served; such of type {known} would work",
            {"kind": repr(str(kind)[:40]), "known": ", ".join(known)},
        )
    if not isinstance(value.get("refusal" if kind == "refusal" else "text"), str):
        raise PydanticCustomError("parts", "a part without its text is not served; one with it would work")
    return Part.model_validate(value)


Parts = Annotated[str | list[Part] | None, PlainValidator(_parts, json_schema_input_type=str | list[Part] | None)]


def _joined(content: str | list[Part] | None) -> str | None:
    return "".join(part.said or "" for part in content) if isinstance(content, list) else content


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class Item(Body):
    """A message (whose type may be left out), a call of a function, its output, or reasoning that is handed back."""

    unserved = Unserved(silent=frozenset({"id", "status", "phase"}))

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts = None
    summary: Parts = None
    encrypted_content: Text | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Parts = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        kind = item.get("type") or ("message" if "role" in item else "item_reference" if "id" in item else "message")
        if kind == "item_reference":
            raise _wrong("type", "'item_reference' is not served: no item is stored here; the item itself would work")
        if isinstance(kind, str) and kind not in _NEEDED:
            raise _wrong("type", f"{kind[:60]!r} is not served; {', '.join(_NEEDED)} would work")
        return item | {"type": kind}

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Self:
        for field in _NEEDED[self.type]:
            if getattr(self, field) is None:
                raise _wrong(field, f"is required in an item of type {self.type}")
        known = _THOUGHT if self.type == "reasoning" else _SAID
        for field, value in (("content", self.content), ("summary", self.summary), ("output", self.output)):
            parts = value if isinstance(value, list) else []
            strange = next((part.type for part in parts if part.type not in known), None)
            if strange is not None:
                raise _wrong(field, f"has a part of type {strange!r}; such of type {', '.join(known)} would work")
        if self.type == "function_call" and not isinstance(self.call.function.parsed(), dict):
            raise _wrong("arguments", "is not the JSON of an object; '{}' would work")
        return self

    @property
    def call(self) -> ToolCall:
        function = CalledFunction.model_construct(name=self.name or "", arguments=self.arguments or "")
        return ToolCall.model_construct(id=self.call_id or "", function=function)

    @property
    def said(self) -> str | None:
        """The text of a message."""
        return _joined(self.content)

    @property
    def thought(self) -> str:
        """What a reasoning item says, or its summary, or what is sealed in it; what another engine sealed says
        nothing."""
        sealed = opened(self.encrypted_content) if self.encrypted_content else None
        return _joined(self.content) or _joined(self.summary) or sealed or ""


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
Input = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS), BeforeValidator(
    _as_items, json_schema_input_type=str | Items
)]  # fmt: skip


def as_messages(items: Sequence[Item]) -> Iterable[Message]:
    """Makes messages of a chat. A message of the assistant, the reasoning before it and the calls after it are one.
    Reasoning that nothing follows is left out."""
    turn: list[Item] = []
    for item in items:
        own = item.type in ("reasoning", "function_call") or item.role == "assistant"
        thinking = all(before.type == "reasoning" for before in turn)
        if not (own and (thinking or item.type == "function_call") and len(turn) < MAX_TOOLS):
            yield from _turn(turn)
            turn = []
        if own:
            turn.append(item)
        elif item.type == "message":
            yield Message(role=item.role or "user", content=item.said)
        else:
            yield Message(role="tool", content=_joined(item.output), tool_call_id=item.call_id)
    yield from _turn(turn)


def _turn(items: Sequence[Item]) -> Iterable[Message]:
    said = [item.said or "" for item in items if item.type == "message"]
    calls = [item.call for item in items if item.type == "function_call"]
    thought = "".join(item.thought for item in items if item.type == "reasoning")
    if said or calls:
        yield Message(
            role="assistant",
            content="".join(said) if said else None,
            tool_calls=calls or None,
            reasoning_content=thought or None,
        )


def _wrong(field: str, sentence: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{sentence}", {"field": field, "sentence": sentence})


# --- reasoning in the form that clients hand back unread, `encrypted_content`: nothing is secret, as it stands in
# `content` too, and some clients hand back nothing else

_MARK = b"pilotfish:"


def sealed(text: str) -> str:
    """Returns reasoning as `encrypted_content`."""
    return base64.b64encode(_MARK + text.encode()).decode()


def opened(content: str) -> str | None:
    """Returns the reasoning in it; None: it is not of this engine's making."""
    try:
        found = base64.b64decode(content, validate=True)
        return found.removeprefix(_MARK).decode() if found.startswith(_MARK) else None
    except ValueError:
        return None
