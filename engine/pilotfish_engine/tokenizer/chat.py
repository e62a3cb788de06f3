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

Message = Mapping[str, str]  # role and content

GROWTH = 1 << 20  # characters that a template may add to four times the messages' own


class TemplateError(Exception):
    """The template refuses these messages; the text says why."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """special_tokens: what the template sees by name (bos_token, eos_token, …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat template is not valid Jinja ({error}); fix it") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that asks for the assistant's next message. Raises TemplateError."""
        plain = [dict(message) for message in messages]
        limit = GROWTH + 4 * sum(len(text) for message in plain for text in message.values())
        parts: list[str] = []
        try:
            for part in self._template.generate(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            ):
                limit -= len(part)
                if limit < 0:
                    raise TemplateError("the chat template makes an endless prompt of these messages")
                parts.append(part)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        return "".join(parts)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # Jinja's own escapes HTML


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
