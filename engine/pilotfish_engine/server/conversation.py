"""What a chat consists of, as OpenAI defines it: messages, the tools that a model may call, and which of them it must.

Knows nothing about how a model writes a call (tool_calls does).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from pilotfish_engine.server.body import Body
from pilotfish_engine.server.text import JsonObject, Text, well_formed, why_no_json
from pilotfish_engine.server.unserved import IN_MESSAGES

MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(Body):
    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """What an assistant said when it would not answer."""

    type: Literal["refusal"]
    refusal: Text


def _content(value: Any) -> Any:
    """A text, or the parts of one."""
    if value is None or isinstance(value, str):
        return value if value is None else well_formed(value)
    if not isinstance(value, list):
        raise PydanticCustomError("content", "a text or a list of parts of type text would work")
    parts: list[TextPart | RefusalPart] = []
    for part in value:
        refusal = isinstance(part, dict) and part.get("type") == "refusal"
        try:
            parts.append((RefusalPart if refusal else TextPart).model_validate(part))
        except ValueError:
            raise PydanticCustomError(
                "parts", "only parts of type text are served, such as {{'type': 'text', 'text': …}}"
            ) from None
    return parts


Parts = list[TextPart | RefusalPart]
Content = Annotated[
    str | Parts | None, PlainValidator(_content, json_schema_input_type=str | list[TextPart] | list[RefusalPart] | None)
]


class CalledFunction(Body):
    name: Text
    arguments: Text

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        if not isinstance(self.parsed(), dict):
            raise _wrong("arguments", "is not the JSON of an object; '{}' would work")
        return self

    def parsed(self) -> Any:
        """None when they are not JSON."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return arguments if why_no_json(arguments) is None else None


class ToolCall(Body):
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """refusal: what an assistant said instead of content. reasoning_content: what it thought before."""

    unserved = IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        if self.text is None and not self.tool_calls:
            raise _wrong("content", "is required; only an assistant's message with tool_calls goes without")
        if self.tool_calls and self.role != "assistant":
            raise _wrong("tool_calls", f"belong to the role assistant, not {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise _wrong("tool_call_id", "is required with the role tool, and belongs to no other")
        return self

    @property
    def text(self) -> str | None:
        """The content, its parts joined; without any, an assistant's refusal."""
        if isinstance(self.content, list):
            return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)
        return self.refusal if self.content is None and self.role == "assistant" else self.content

    def for_template(self) -> dict[str, Any]:
        """As `transformers` gives it to templates: arguments are objects, and the role developer has its old name."""
        shown: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text or "",
        }
        if self.role == "assistant" and self.reasoning_content is not None:
            shown["reasoning_content"] = self.reasoning_content
            if self.tool_calls and not self.text:  # as gpt-oss' template has it, which takes one of both
                shown["thinking"] = self.reasoning_content
        if self.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": call.function.parsed()},
                }
                for call in self.tool_calls
            ]
        return shown | {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}


class Function(Body):
    """strict: the arguments of a call that is enforced always fit the parameters; of one that is not, never surely."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class FunctionChoice(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionChoice


Choice = Literal["none", "auto", "required"]


def _as_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    try:
        return NamedTool.model_validate(value)
    except ValueError:
        raise PydanticCustomError(
            "tool_choice",
            "'none', 'auto', 'required' or {{'type': 'function', 'function': {{'name': …}}}} would work",
        ) from None


ToolChoice = Annotated[
    Choice | NamedTool | None, PlainValidator(_as_choice, json_schema_input_type=Choice | NamedTool | None)
]


def check_tools(tools: list[Tool], choice: Choice | NamedTool | None) -> None:
    """Raises PydanticCustomError (type `field`) when a name occurs twice, or one is chosen that is not there."""
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _wrong("tools", f"has two functions named {twice!r}; names that differ would work")
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise _wrong("tool_choice", "needs tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise _wrong("tool_choice", f"names {choice.function.name!r}, and tools has {', '.join(names)}")


def _wrong(field: str, sentence: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{sentence}", {"field": field, "sentence": sentence})
