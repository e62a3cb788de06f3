"""The items of a conversation as the Responses API writes them, and the chat messages that they are.

Knows nothing about the rest of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from pilotfish_engine.server.body import Body, Unserved
from pilotfish_engine.server.conversation import MAX_TOOLS, CalledFunction, Message, ToolCall
from pilotfish_engine.server.responses.sealing import opened
from pilotfish_engine.server.text import Text

MAX_ITEMS = 4095  # with the instructions they are as many messages as a chat may have

# types of parts: the field in which they have their text
_TEXTS: Mapping[str, str] = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS: Mapping[str, str] = {"reasoning_text": "text", "summary_text": "text", "text": "text"}


class Part(BaseModel):
    """As a client sends it; other fields are left unread."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None


def _joined(value: Any, known: Mapping[str, str] = _TEXTS) -> Any:
    """A text, or a list of parts with texts, which are joined."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        field = known.get(kind) if isinstance(kind, str) else None
        if field is None or not isinstance(part.get(field), str):
            what = f"a part of type {str(kind)[:40]!r}" if field is None else "a part without its text"
            raise PydanticCustomError(
                "parts", "{what} is not served; such of type {known} would work",
                {"what": what, "known": ", ".join(known)},
            )  # fmt: skip
        texts.append(part[field])
    return "".join(texts)


Content = Annotated[
    Text | None, BeforeValidator(lambda value: _joined(value), json_schema_input_type=str | list[Part] | None)
]

_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class Item(Body):
    """A message (whose type may be left out), a call of a function, its output, or reasoning that is handed back."""

    unserved = Unserved(silent=frozenset({"id", "status", "summary", "encrypted_content", "phase"}))

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Content = None

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
        if kind == "reasoning":
            return {"type": kind, "content": _thought(item)}
        return item | {"type": kind}

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Self:
        for field in _NEEDED[self.type]:
            if getattr(self, field) is None:
                raise _wrong(field, f"is required in an item of type {self.type}")
        if self.type == "function_call" and not isinstance(self._call().function.parsed(), dict):
            raise _wrong("arguments", "is not the JSON of an object; '{}' would work")
        return self

    def _call(self) -> ToolCall:
        function = CalledFunction.model_construct(name=self.name or "", arguments=self.arguments or "")
        return ToolCall.model_construct(id=self.call_id or "", function=function)


def _thought(item: Mapping[str, Any]) -> str:
    """What a reasoning item says, or its summary, or what is sealed in it; what another engine sealed says nothing."""
    for field in ("content", "summary"):
        try:
            text = _joined(item.get(field), _THOUGHTS)
        except PydanticCustomError as error:
            raise _wrong(field, f"cannot be read: {error.message()}") from None
        if isinstance(text, str) and text:
            return text
    secret = item.get("encrypted_content")
    return (opened(secret) or "") if isinstance(secret, str) else ""


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
Input = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS), BeforeValidator(
    _as_items, json_schema_input_type=str | Items
)]  # fmt: skip


def as_messages(items: Sequence[Item]) -> Iterable[Message]:
    """A message of the assistant, the reasoning before it and the calls after it are one message of a chat. Reasoning
    that nothing follows is left out."""
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
            yield Message(role=item.role or "user", content=item.content)
        else:
            yield Message(role="tool", content=item.output, tool_call_id=item.call_id)
    yield from _turn(turn)


def _turn(items: Sequence[Item]) -> Iterable[Message]:
    said = [item.content or "" for item in items if item.type == "message"]
    calls = [item._call() for item in items if item.type == "function_call"]
    thought = "".join(item.content or "" for item in items if item.type == "reasoning")
    if said or calls:
        yield Message(
            role="assistant",
            content="".join(said) if said else None,
            tool_calls=calls or None,
            reasoning_content=thought or None,
        )


def _wrong(field: str, sentence: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{sentence}", {"field": field, "sentence": sentence})
