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
from pilotfish_engine.server.text import Text

MAX_ITEMS = 4095  # with the instructions they are as many messages as a chat may have

# types of parts: the field in which they have their text
_TEXTS: Mapping[str, str] = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class Part(BaseModel):
    """As a client sends it; other fields are left unread."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None


def _joined(value: Any) -> Any:
    """A text, or a list of parts with texts, which are joined."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        field = _TEXTS.get(kind) if isinstance(kind, str) else None
        if field is None or not isinstance(part.get(field), str):
            what = f"a part of type {str(kind)[:40]!r}" if field is None else "a part without its text"
            raise PydanticCustomError(
                "parts", "{what} is not served; such of type {known} would work",
                {"what": what, "known": ", ".join(_TEXTS)},
            )  # fmt: skip
        texts.append(part[field])
    return "".join(texts)


Content = Annotated[Text | None, BeforeValidator(_joined, json_schema_input_type=str | list[Part] | None)]

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
            return {"type": kind}
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


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
Input = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS), BeforeValidator(
    _as_items, json_schema_input_type=str | Items
)]  # fmt: skip


def as_messages(items: Sequence[Item]) -> Iterable[Message]:
    """A message of the assistant and the calls after it are one message of a chat."""
    turn: list[Item] = []
    for item in items:
        said = item.type == "message" and item.role == "assistant"
        goes_on = item.type == "function_call" and len(turn) < MAX_TOOLS
        if turn and not goes_on:
            yield _turn(turn)
            turn = []
        if item.type == "reasoning":
            continue
        if said or item.type == "function_call":
            turn.append(item)
        elif item.type == "message":
            yield Message(role=item.role or "user", content=item.content)
        else:
            yield Message(role="tool", content=item.output, tool_call_id=item.call_id)
    if turn:
        yield _turn(turn)


def _turn(items: Sequence[Item]) -> Message:
    said = [item.content or "" for item in items if item.type == "message"]
    calls = [item._call() for item in items if item.type == "function_call"]
    return Message(role="assistant", content="".join(said) if said or not calls else None, tool_calls=calls or None)


def _wrong(field: str, sentence: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{sentence}", {"field": field, "sentence": sentence})
