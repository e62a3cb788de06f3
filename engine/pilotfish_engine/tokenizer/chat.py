"""A checkpoint's chat template, rendered in a sandbox: a template is foreign code.

Knows nothing about tokens. What templates may use beside Jinja itself is what `transformers` gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pilotfish_engine.errors import CheckpointError

Message = Mapping[str, Any]  # role, content, and what else `transformers` gives to templates
Tool = Mapping[str, Any]

GROWTH = 1 << 20  # characters that a template may add to four times those of what it shows


class TemplateError(Exception):
    """The template refuses these messages; the text says why."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """special_tokens: what the template sees by name (bos_token, eos_token, …). tool_use: another template for chats
    with tools, where the checkpoint has one.

    The sandbox keeps a template from everything outside, and its output is bounded; its time and memory are not, but
    where it is rendered by tokenizer.apart. Compiling evaluates nothing of it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.tool_use = tool_use
        self._template = _compiled(source)
        self._with_tools = self._template if tool_use is None else _compiled(tool_use)

    def source_for(self, *, tools: bool) -> str:
        """The template that chats with or without tools are rendered by."""
        return self.tool_use if tools and self.tool_use is not None else self.source

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), variables: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt that asks for the assistant's next message. variables: what else the template sees, such as
        enable_thinking. Raises TemplateError."""
        own: dict[str, Any] = {
            "messages": [{k: value for k, value in message.items() if value is not None} for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": True,
            **self.special_tokens,
        }
        taken = own.keys() & (variables or {}).keys()
        if taken:
            raise TemplateError(f"the variable {min(taken)!r} is not free; other names would work")
        limit = GROWTH + 4 * len(json.dumps([own, variables], ensure_ascii=False))
        parts: list[str] = []
        try:
            template = self._with_tools if tools else self._template
            for part in template.generate(own | dict(variables or {})):
                limit -= len(part)
                if limit < 0:
                    raise TemplateError("the chat template makes an endless prompt of these messages")
                parts.append(part)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        return "".join(parts)


def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _Generation],
        optimized=False,
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    try:
        parsed = environment.parse(source)
        if parsed.find(nodes.EvalContextModifier) is not None:  # its argument would be evaluated by the compiler
            raise jinja2.TemplateSyntaxError("autoescape is not for prompts", 1)
        return environment.from_string(parsed)
    except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's chat template is not valid Jinja ({error}); fix it") from error


@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    """What needs the context cannot be evaluated when a template is compiled, however constant it looks."""
    return value


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # Jinja's own escapes HTML


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
