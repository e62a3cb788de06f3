"""What sections of calls consist of: JSON objects, names before JSON objects, tags around each argument, Python.

Facts are those of the families' published chat templates, model cards and of vLLM's and SGLang's parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from pilotfish_engine.server.tool_formats.reading import End, Foreign, Gap, Head, Place, Whole, object_end
from pilotfish_engine.tokenizer import held_back

_HEADER = re.compile(
    r'\{\s{0,16}"name"\s{0,16}:\s{0,16}("(?:[^"\\]|\\.){0,256}")\s{0,16},\s{0,16}"(?:arguments|parameters)"\s{0,16}:\s{0,16}(?=\{)'
)
_KEYS = ("type", "id", "function", "parameters", "arguments")  # that a call may begin with beside its name
_HALVES = re.compile("[\ud800-\udfff]")
BLANKS = " \t\r\n"
_LONGEST_TAG = 40  # characters
_LONGEST = 1024  # characters as far as a call's arguments, where it is told from content


@dataclass(frozen=True)
class Tags:
    """begins: open a section. passed: more tags between calls, which say nothing. ends: close it."""

    begins: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    between: str = BLANKS + ",;[]}"

    def around(self, text: str, last: bool, bare: bool) -> Place | None:
        """What is between calls at the beginning of `text`. What may yet become a tag is left out."""
        gap = self._gap(text, last, self.passed if bare else (*self.begins, *self.passed))
        if gap:
            return Gap(gap)
        end = next((len(end) for end in self.ends if text.startswith(end)), 0)
        return End(end) if end else None

    def _gap(self, text: str, last: bool, tags: Sequence[str]) -> int:
        at = 0
        while at < len(text):
            tag = next((len(tag) for tag in tags if text.startswith(tag, at)), 0)
            if not tag:
                rest = text[at : at + _LONGEST_TAG]
                if text[at] not in self.between or (not last and any(tag.startswith(rest) for tag in self._all)):
                    break
            at += tag or 1
        return at

    @property
    def _all(self) -> tuple[str, ...]:
        return (*self.begins, *self.passed, *self.ends)

    def opens(self, text: str) -> bool:
        """Whether `text` is the beginning of a tag, and may become a whole one."""
        return held_back(text, self._all) == len(text)

    def foreign(self, text: str) -> Foreign | None:
        """What is no call, at most to the tag that ends or opens a section. Where no tag ends one, what follows is
        content like any other."""
        if not self.ends:
            return Foreign(1)
        found = [at + len(end) for end in self.ends if (at := text.find(end)) >= 0]
        found += [at for begin in self.begins if (at := text.find(begin, 1)) >= 0]
        return Foreign(min(found)) if found else None


@dataclass(frozen=True)
class Objects:
    """Calls are JSON objects with a name and arguments. names: those that a bare call may have."""

    tags: Tags
    names: Collection[str] = ()
    bare: bool = False

    @property
    def begins(self) -> Sequence[str]:
        return self.tags.begins

    def place(self, text: str, last: bool, bare: bool) -> Place | None:
        around = self.tags.around(text, last, bare)
        if around is not None:
            return around
        match = _HEADER.match(text)
        name = None if match is None else loaded(match[1])
        if match is not None and named(name) and (not bare or name in self.names):
            return Head(name, match.end(), enclosed=True)
        if self.tags.opens(text) and not last:
            return None
        if bare and not self._may_be_bare(text, last):
            return Foreign(0)
        if not text.startswith("{"):
            return self.tags.foreign(text)
        end = object_end(text)
        if end is None:
            return self.tags.foreign(text) if last and self.tags.ends else None
        calls = called(loaded(text[:end]), bare)
        if calls is None or (bare and any(name not in self.names for name, _ in calls)):
            return Foreign(0) if bare else self.tags.foreign(text)
        return Whole(calls, end)

    def _may_be_bare(self, text: str, last: bool) -> bool:
        """Whether an object that begins like this can be a call of one of the names."""
        squeezed = "".join(text[:_LONGEST].split())
        beginnings = [f'{{"name":{json.dumps(name)},' for name in self.names] + [f'{{"{key}":' for key in _KEYS]
        if any(squeezed.startswith(beginning) for beginning in beginnings):
            return True
        return not last and len(text) < _LONGEST and any(b.startswith(squeezed) for b in beginnings)


@dataclass(frozen=True)
class Named:
    """A name stands before its arguments. header: to their opening brace, with the group `name`, and `id` where the
    model numbers its calls."""

    tags: Tags
    header: re.Pattern[str]
    bare: bool = False

    @property
    def begins(self) -> Sequence[str]:
        return self.tags.begins

    def place(self, text: str, last: bool, bare: bool) -> Place | None:
        match = self.header.match(text)
        if match is not None:
            return Head(match["name"], match.end(), match.groupdict().get("id"))
        around = self.tags.around(text, last, bare)
        if around is not None:
            return around
        return self.tags.foreign(text) if self.tags.ends or last else None


def called(value: Any, with_arguments: bool = False) -> list[tuple[str, str]] | None:
    """Names and arguments of what may be a call or a list of them. They may have any of the forms that models write.
    with_arguments: without them it is no call."""
    if isinstance(value, list):
        found = [called(each, with_arguments) for each in value]
        return None if not found or None in found else [call for calls in found for call in calls or []]
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    elif isinstance(inner, str):
        value = {**value, "name": inner}
    if not named(value.get("name")) or (with_arguments and not {"arguments", "parameters"} & value.keys()):
        return None
    arguments = value.get("arguments", value.get("parameters")) or {}
    if isinstance(arguments, str):
        arguments = loaded(arguments)
    return [(value["name"], dumped(arguments))] if isinstance(arguments, dict) else None


def named(name: Any) -> TypeGuard[str]:
    """Whether it can be a function's or an argument's name."""
    return isinstance(name, str) and not _HALVES.search(name)


def loaded(text: str) -> Any:
    """None when it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def dumped(value: Any) -> str:
    """Halves of surrogate pairs, which no answer can hold, stay escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _HALVES.search(text) else text
