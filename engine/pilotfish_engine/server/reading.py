"""How the answers to one chat are read, and the grammar they are held to: by the model's formats and the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pilotfish_engine.config import ServerConfig
from pilotfish_engine.errors import UsageError
from pilotfish_engine.messages import Grammar, Stage, Thought
from pilotfish_engine.server import reasoning, tool_formats
from pilotfish_engine.server.bodies import ChatRequest
from pilotfish_engine.server.conversation import NamedTool
from pilotfish_engine.server.failures import Invalid
from pilotfish_engine.server.parts import ContentReader, Reader
from pilotfish_engine.server.reasoning import ReasoningReader, Style
from pilotfish_engine.server.schemas import SchemaError, plain
from pilotfish_engine.server.tool_calls import Calls, stage_of
from pilotfish_engine.server.tool_formats import Format
from pilotfish_engine.server.tool_formats.harmony import HarmonyReader
from pilotfish_engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reading:
    """visible: special tokens that are read. grammar: what an answer must be, and the field that says so. thought: how
    reasoning is written, in which stop strings end nothing."""

    new_reader: Callable[[], Reader]
    visible: tuple[int, ...] = ()
    grammar: Grammar | None = None
    field: str = "response_format"
    thought: Thought | None = None


@dataclass(frozen=True)
class Formats:
    """What a model's answers are written in; None: it knows no calls, no reasoning."""

    calls: Format | None
    reasoning: Style | None
    template: str
    tokenizer: Tokenizer


def check_names(config: ServerConfig) -> None:
    """Raises UsageError when a format is named that is not known."""
    known = {
        "--tool-call-parser": (config.tool_call_parser, tool_formats.BY_NAME),
        "--reasoning-parser": (config.reasoning_parser, reasoning.BY_NAME),
    }
    for flag, (name, names) in known.items():
        if name not in ("auto", "none", *names):
            raise UsageError(f"{flag} {name!r} is unknown; one of auto, none, {', '.join(sorted(names))} would work")


def formats_of(config: ServerConfig, tokenizer: Tokenizer, tools: bool) -> Formats:
    """By the flags, or else by the chat template (that for tools, where there are two) and the vocabulary."""
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.source_for(tools=tools)
    calls = tool_formats.BY_NAME.get(config.tool_call_parser)
    style = reasoning.BY_NAME.get(config.reasoning_parser)
    if config.tool_call_parser == "auto":
        calls = tool_formats.detected(template)
    if config.reasoning_parser == "auto":
        style = reasoning.detected(template, lambda text: tokenizer.backend.token_to_id(text) is not None)
    return Formats(calls, style, template, tokenizer)


def read_chat(body: ChatRequest, formats: Formats, prompt: str) -> Reading:
    """prompt: as rendered. Raises Invalid when the request asks for what the model cannot do."""
    tokenizer, style = formats.tokenizer, formats.reasoning
    calls = _calls(body, formats)
    harmony = style is reasoning.HARMONY
    markers = (*(calls.format.markers if calls else ()), *((*style.begins, *style.ends) if style else ()))
    if harmony:
        markers += tool_formats.harmony.MARKERS
    specials = tokenizer.specials(markers)
    opened = style is not None and reasoning.opened(style, prompt)

    def new_reader() -> Reader:
        if harmony and (calls is None or calls.format is tool_formats.harmony.FORMAT):
            return HarmonyReader(calls is None or calls.several)
        inner = ContentReader() if calls is None else calls.reader()
        return inner if style is None or harmony else ReasoningReader(style, opened, inner)

    stages = () if style is None or harmony else _stages(style, opened, prompt, tokenizer)
    grammar, field = _demanded(body, calls, stages)
    thought = None if style is None else reasoning.thought(style, opened)
    return Reading(new_reader, tuple(specials.values()), grammar, field, thought)


def _stages(style: Style, opened: bool, prompt: str, tokenizer: Tokenizer) -> Sequence[Stage]:
    """What comes before a grammar: reasoning that the prompt has opened, or that the model may open with one token."""
    specials = tokenizer.specials(style.ends)
    if opened:
        return (stage_of(style.ends, specials),)
    begin = tokenizer.backend.token_to_id(style.begins[0])
    if begin is None or prompt.rstrip().endswith(style.ends):
        return ()
    return (stage_of(style.ends, specials, begin),)


def _calls(body: ChatRequest, formats: Formats) -> Calls | None:
    if not body.offered_tools:
        return None
    format_ = formats.calls
    if format_ is None and body.choice == "auto":
        raise Invalid(
            "tools cannot be left to this model: its chat template shows none, or writes calls in a way that is not "
            "known; tool_choice 'required' or a named function would work",
            "tools",
        )
    named = body.choice.function.name if isinstance(body.choice, NamedTool) else None
    format_ = format_ or tool_formats.BY_NAME["json"]
    return Calls(
        format_,
        [tool.function for tool in body.offered_tools if named in (None, tool.function.name)],
        required=body.choice != "auto",
        several=named is None and body.parallel_tool_calls is not False,
        template=formats.template,
        specials=formats.tokenizer.specials(format_.markers),
    )


def _demanded(body: ChatRequest, calls: Calls | None, stages: Sequence[Stage]) -> tuple[Grammar | None, str]:
    """What the answer must be, and the field that says so."""
    structured = body.structured_outputs is not None
    form = body.structured_outputs.as_grammar() if body.structured_outputs is not None else body.answer_format
    if calls is None:
        grammar = None if form is None else msgspec.structs.replace(form, after=tuple(stages))
        return grammar, "structured_outputs" if structured else "response_format"
    if form is not None and not calls.tagged:
        raise Invalid(
            "response_format excludes tools with this model, whose calls are JSON as well; tool_choice 'none' would "
            "work",
            "response_format",
        )
    if calls.required or calls.strict or form is not None:
        _check_parameters(body)
    return calls.grammar(form, stages), "tools"


def _check_parameters(body: ChatRequest) -> None:
    """Raises Invalid where a function's parameters cannot be enforced."""
    for index, tool in enumerate(body.offered_tools):
        try:
            plain(tool.function.parameters or {})
        except SchemaError as error:
            path = f"tools[{index}].function.parameters.{error.path}"
            raise Invalid(f"{path} {error.sentence}", path) from error
