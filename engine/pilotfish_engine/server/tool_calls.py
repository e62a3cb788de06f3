"""Calls of tools as models write them: grammars that enforce a call, and readers that find calls in an answer's text.

Two ways of writing are known, told apart by the chat template:

    Hermes (Hermes 2, Qwen 2.5, Qwen 3):  <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, between texts
    JSON (Llama 3.1 and later):           {"name": …, "parameters": {…}}, at the beginning, several joined by "; "

Knows nothing about HTTP. A reader is fed an answer's text in parts; what it tells does not depend on how it was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pilotfish_engine.messages import Grammar
from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.schemas import plain
from pilotfish_engine.tokenizer import held_back

Style = Literal["hermes", "json"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_ANY_OBJECT = '{"type": "object"}'
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# a call as far as its arguments' opening brace
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){0,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BETWEEN = " \t\r\n;,}"
_LONGEST_HEADER = 1024  # characters, blanks included


def style_of(template: str) -> Style | None:
    """None: the template shows no tools, or its model writes calls in another way."""
    if _BEGIN in template and "<function=" not in template:
        return "hermes"
    return "json" if "tools" in template and '"parameters":' in template else None


@dataclass(frozen=True)
class CallPart:
    """Of call number `index`: its name, in its first part only, and the next characters of its arguments' JSON."""

    index: int
    name: str | None
    arguments: str


@dataclass
class Found:
    """What a part of an answer's text says."""

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)


class Reader(Protocol):
    def feed(self, text: str, last: bool) -> Found:
        """`last`: no more text comes."""
        ...


@dataclass(frozen=True)
class Calls:
    """What an answer may call. several: it may call more than one function; where it does though it may not, only the
    first is told."""

    style: Style
    functions: Sequence[Function]
    required: bool
    several: bool

    def reader(self) -> Reader:
        if self.style == "hermes":
            return HermesReader(self.several)
        return JsonReader([function.name for function in self.functions], self.several)

    def grammar(self, form: Grammar | None) -> Grammar:
        """Calls and nothing else; unless they are required, or else what `form` (JSON) says, which a call must not look
        like: only with Hermes' tags."""
        opening, key, closing, joint = (
            (_BEGIN + "\n", "arguments", "\n" + _END, "\n") if self.style == "hermes" else ("", "parameters", "", "; ")
        )
        rules = ["start: calls"]
        if form is not None and not self.required:
            rules = ["start: calls | answer", f"answer: %json {form.text or _ANY_OBJECT}"]
        rules.append(f"calls: call ({json.dumps(joint)} call)*" if self.several else "calls: call")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(self.functions))))
        for number, function in enumerate(self.functions):
            header = f'{opening}{{"name": {json.dumps(function.name)}, "{key}": '
            schema = json.dumps(_NO_PARAMETERS if function.parameters is None else plain(function.parameters))
            rules.append(f"call_{number}: {json.dumps(header)} %json {schema} {json.dumps('}' + closing)}")
        # "::=" would make it GBNF; within the strings of a schema it can be written otherwise
        return Grammar("ebnf", "\n".join(rules).replace("::=", "\\u003a:="))


class _Arguments:
    """Follows the characters of one JSON object to its closing brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, text: str) -> int | None:
        """How many of these characters end the object; None: all are within it."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


class _Calls:
    """Numbers the calls of an answer, and follows the one whose arguments are coming."""

    def __init__(self, several: bool) -> None:
        self._several = several
        self.count = 0
        self._arguments: _Arguments | None = None

    @property
    def open(self) -> bool:
        return self._arguments is not None

    def begin(self, name: str, found: Found) -> None:
        self.count += 1
        self._arguments = _Arguments()
        self._tell(CallPart(self.count - 1, name, ""), found)

    def take(self, text: str, found: Found) -> str:
        """Of `text` what is left when the arguments have ended."""
        assert self._arguments is not None, "no call is open"
        end = self._arguments.take(text)
        part = text if end is None else text[:end]
        if part:
            self._tell(CallPart(self.count - 1, None, part), found)
        if end is None:
            return ""
        self._arguments = None
        return text[end:]

    def whole(self, text: str, found: Found) -> bool:
        """A call whose parts come in another order, or whose arguments are a string of JSON; False: it is none."""
        call = _loaded(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return False
        arguments = call.get("arguments", call.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = _loaded(arguments)
        if not isinstance(arguments, dict):
            return False
        self.count += 1
        self._tell(CallPart(self.count - 1, call["name"], json.dumps(arguments, ensure_ascii=False)), found)
        return True

    def _tell(self, part: CallPart, found: Found) -> None:
        if part.index > 0 and not self._several:
            return
        before = found.calls[-1] if found.calls else None
        if before is not None and before.index == part.index:
            found.calls[-1] = CallPart(part.index, before.name, before.arguments + part.arguments)
        else:
            found.calls.append(part)


class HermesReader:
    """Text between calls is content; blank text before, between and after them is not."""

    def __init__(self, several: bool) -> None:
        self._calls = _Calls(several)
        self._text = ""  # not decided yet
        self._blank = ""  # before the tag, and content if that is none
        self._where: Literal["content", "header", "arguments", "tail"] = "content"

    def feed(self, text: str, last: bool) -> Found:
        found = Found()
        self._text += text
        moved = True
        while moved:
            moved = {
                "content": self._content, "header": self._header, "arguments": self._arguments, "tail": self._tail
            }[self._where](found, last)  # fmt: skip
        return found

    def _content(self, found: Found, last: bool) -> bool:
        before, begin, after = self._text.partition(_BEGIN)
        if begin:
            shown = before.rstrip()
            found.content += shown
            self._blank = before[len(shown) :]
            self._text, self._where = after, "header"
            return True
        end = len(before) if last else len(before) - held_back(before, [_BEGIN])
        if self._calls.count or not last:
            end = len(before[:end].rstrip())
        found.content += before[:end]
        self._text = before[end:]
        return False

    def _header(self, found: Found, last: bool) -> bool:
        match = _HEADER.match(self._text)
        name = None if match is None else _loaded(match[1])
        if match is not None and isinstance(name, str):
            self._calls.begin(name, found)
            self._text, self._where = self._text[match.end() :], "arguments"
            return True
        inside, end, after = self._text.partition(_END)
        if not (end or last):
            return False
        if not self._calls.whole(inside, found):  # no call, whatever it is
            found.content += self._blank + _BEGIN + inside + end
        self._text, self._where = after, "content"
        return bool(end)

    def _arguments(self, found: Found, last: bool) -> bool:
        self._text = self._calls.take(self._text, found)
        if self._calls.open:
            return False
        self._where = "tail"
        return True

    def _tail(self, found: Found, last: bool) -> bool:
        """To the closing tag, or to the next opening one where a model forgot it."""
        match = re.search(f"{_END}|(?={_BEGIN})", self._text)
        if match is None:
            return False
        self._text, self._where = self._text[match.end() :], "content"
        return True


class JsonReader:
    """Calls stand at the beginning; an answer that begins otherwise, or names another function, is content."""

    def __init__(self, names: Sequence[str], several: bool) -> None:
        self._calls = _Calls(several)
        self._names = names
        self._headers = [
            f'{{"name":{json.dumps(name)},"{key}":{{' for name in names for key in ("arguments", "parameters")
        ]
        self._text = ""  # not decided yet
        self._where: Literal["header", "arguments", "content"] = "header"

    def feed(self, text: str, last: bool) -> Found:
        found = Found()
        self._text += text
        while self._where != "content":
            if self._where == "arguments":
                self._text = self._calls.take(self._text, found)
                if self._calls.open:
                    return found
                self._where = "header"
            elif not self._header(found, last):
                return found
        found.content, self._text = self._text, ""
        return found

    def _header(self, found: Found, last: bool) -> bool:
        """False: more text is needed."""
        text = self._text.lstrip(_BETWEEN) if self._calls.count else self._text
        match = _HEADER.match(text)
        if match is not None and (name := _loaded(match[1])) in self._names:
            self._calls.begin(name, found)
            self._text, self._where = text[match.end() :], "arguments"
            return True
        squeezed = "".join(text[:_LONGEST_HEADER].split())
        if not last and len(text) < _LONGEST_HEADER and any(h.startswith(squeezed) for h in self._headers):
            return False
        self._text, self._where = text, "content"
        return True


def _loaded(text: str) -> Any:
    """None when it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
