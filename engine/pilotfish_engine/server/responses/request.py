"""The body of POST /v1/responses, and the chat that it is.

What generates is the chat: a field means there what it means here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from pilotfish_engine.messages import MAX_LOGPROBS
from pilotfish_engine.server.bodies import MAX_TOKENS, ChatRequest, ReasoningEffort, Sampling
from pilotfish_engine.server.body import Body, Unserved, Values
from pilotfish_engine.server.conversation import (
    MAX_TOOLS,
    Function,
    FunctionName,
    Message,
    NamedTool,
    Tool,
    check_tools,
)
from pilotfish_engine.server.conversation import FunctionChoice as ChatChoice
from pilotfish_engine.server.responses.items import Input, as_messages
from pilotfish_engine.server.structure import JsonSchema, ResponseFormat, Schema
from pilotfish_engine.server.text import JsonObject, Text
from pilotfish_engine.server.unserved import IN_CHATS

_NOTHING = (None,)
_CHANGES_ANSWERS: Values = {
    **{field: values for field, values in IN_CHATS.refused.items() if field != "max_output_tokens"},
    "background": (None, False),
    "background_options": _NOTHING,
    "context_management": (None, []),
    "conversation": _NOTHING,
    "logprobs": (None, False),
    "max_completion_tokens": _NOTHING,
    "max_tokens": _NOTHING,
    "messages": _NOTHING,
    "n": (None, 1),
    "previous_response_id": _NOTHING,
    "prompt": _NOTHING,
    "reasoning_effort": _NOTHING,
    "response_format": _NOTHING,
}
_KEPT_NOWHERE = "no response is stored here, and the items of the conversation, sent in input, would work"
_INSTEAD: Mapping[str, str] = {
    **IN_CHATS.instead,
    "background": "no response is stored here, and stream: true would work",
    "conversation": _KEPT_NOWHERE,
    "logprobs": "include with 'message.output_text.logprobs' would work",
    "max_completion_tokens": "max_output_tokens would work",
    "max_tokens": "max_output_tokens would work",
    "messages": "input would work",
    "previous_response_id": _KEPT_NOWHERE,
    "prompt": "no prompt is stored here, and instructions would work",
    "reasoning_effort": "reasoning.effort would work",
    "response_format": "text.format would work",
}


class TextFormat(Body):
    """What the answer's text must be; the schema stands beside its name."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> Self:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise _wrong("schema", "is required with the type json_schema, and belongs to no other")
        return self

    def for_chat(self) -> ResponseFormat:
        if self.schema_ is None:
            return ResponseFormat(type=self.type)
        schema = JsonSchema(name=self.name, description=self.description, schema=self.schema_, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextConfig(Body):
    unserved = Unserved(ignored={"verbosity": (None, "medium")})

    format: TextFormat | None = None


class Reasoning(Body):
    """effort reaches the chat template. summary: reasoning is told in full instead."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: JsonObject | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise _wrong("type", f"{kind[:60]!r} is not served: this engine has no tools; 'function' would work")
        return tool

    def for_chat(self) -> Tool:
        own = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        return Tool(type="function", function=Function(**own))


class FunctionChoice(Body):
    type: Literal["function"]
    name: FunctionName


class AllowedTools(Body):
    """Those of the tools that the model is shown, and whether it must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1, max_length=MAX_TOOLS)


Choice = Literal["none", "auto", "required"]


def _as_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    try:
        return (AllowedTools if kind == "allowed_tools" else FunctionChoice).model_validate(value)
    except ValueError:
        raise PydanticCustomError(
            "tool_choice",
            "'none', 'auto', 'required', {{'type': 'function', 'name': …}} or {{'type': 'allowed_tools', 'mode': "
            "'auto' or 'required', 'tools': [{{'type': 'function', 'name': …}}, …]}} would work",
        ) from None


ToolChoice = Annotated[
    Choice | FunctionChoice | AllowedTools | None,
    PlainValidator(_as_choice, json_schema_input_type=Choice | FunctionChoice | AllowedTools | None),
]
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class Tools(Body):
    """max_tool_calls counts calls of tools that an engine has itself, and this one has none."""

    max_tool_calls: int | None = Field(None, ge=1, le=MAX_TOKENS)
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None


class ResponsesRequest(Sampling, Tools):
    """store may be what it likes: nothing is. truncation: an input that does not fit is refused."""

    unserved = Unserved(_CHANGES_ANSWERS, IN_CHATS.ignored, _INSTEAD)

    input: Input
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    include: list[Includable] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        if not any(True for _ in as_messages(self.input)):
            raise _wrong("input", "holds nothing but reasoning; a message would work")
        tools = [tool.for_chat() for tool in self.tools or []]
        if isinstance(self.tool_choice, AllowedTools):
            for tool in self.tool_choice.tools:
                check_tools(tools, _named(tool.name))
        else:
            check_tools(tools, self._chat_choice())
        if self.structured_outputs is not None and (self.answer_format is not None or self._offers_tools()):
            raise _wrong("structured_outputs", "excludes text.format and calls of tools; one of them would work")
        return self

    @property
    def answer_format(self) -> TextFormat | None:
        """None: any text."""
        form = None if self.text is None else self.text.format
        return None if form is None or form.type == "text" else form

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or [])

    def as_chat(self) -> ChatRequest:
        """Returns the same request of the chat API. A call that is required comes without a message, so that
        text.format has nothing to say then."""
        choice = self._chat_choice()
        form = None if choice == "required" or isinstance(choice, NamedTool) else self.answer_format
        messages = list(as_messages(self.input))
        if self.instructions is not None:
            messages.insert(0, Message(role="system", content=self.instructions))
        return ChatRequest(
            **{field: getattr(self, field) for field in Sampling.model_fields},
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            response_format=None if form is None else form.for_chat(),
            tools=self._chat_tools() or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def _chat_tools(self) -> list[Tool]:
        tools = self.tools or []
        if isinstance(self.tool_choice, AllowedTools):
            allowed = {tool.name for tool in self.tool_choice.tools}
            tools = [tool for tool in tools if tool.name in allowed]
        return [tool.for_chat() for tool in tools]

    def _chat_choice(self) -> Choice | NamedTool | None:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.mode
        return _named(choice.name) if isinstance(choice, FunctionChoice) else choice


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=ChatChoice(name=name))


def _wrong(field: str, sentence: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{sentence}", {"field": field, "sentence": sentence})
