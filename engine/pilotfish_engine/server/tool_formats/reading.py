"""Calls found in an answer's text as it comes: one machine for all families, which differ in what a section says next.

Text outside of calls is content; blank text before, between and after them is not. What looks like a call and is none
is content as well, with its tags: nothing that a model wrote is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pilotfish_engine.server.parts import CallPart, Content, Part, joined
from pilotfish_engine.tokenizer import held_back


@dataclass(frozen=True)
class Head:
    """A call whose arguments, a JSON object, begin at `end`. enclosed: within an object, whose rest is skipped."""

    name: str
    end: int
    id: str | None = None
    enclosed: bool = False


@dataclass(frozen=True)
class Whole:
    """Calls as far as `end`: names and the JSON of their arguments."""

    calls: Sequence[tuple[str, str]]
    end: int


@dataclass(frozen=True)
class Gap:
    """Tags and blanks as far as `end`."""

    end: int


@dataclass(frozen=True)
class End:
    """The section ends with the tag as far as `end`."""

    end: int


@dataclass(frozen=True)
class Foreign:
    """What is no call as far as `end`, where the section ends."""

    end: int


Place = Head | Whole | Gap | End | Foreign


class Section(Protocol):
    """begins: what opens a section anywhere in a text. bare: an answer may also begin with calls as they are."""

    @property
    def begins(self) -> Sequence[str]: ...

    @property
    def bare(self) -> bool: ...

    def place(self, text: str, last: bool, bare: bool) -> Place | None:
        """What a section says next, its opening tag included. None: more text is needed. last: none comes; None is
        then the same as Foreign. bare: no tag opened the section, and Foreign(0) leaves the text to be content."""
        ...


class CallReader:
    """several: more than one call may be told; where not, those behind the first are dropped."""

    reasoned = 0

    def __init__(self, section: Section, several: bool, new_id: Callable[[], str]) -> None:
        self._section = section
        self._several = several
        self._new_id = new_id
        self._ids: set[str] = set()
        self._count = 0
        self._text = ""  # not decided yet
        self._untold = ""  # blanks and tags since the section's last call, and content if none follows
        self._called = False  # in this section
        self._bare = section.bare
        self._object = _Object()
        self._enclosed = False
        self._where: Literal["content", "section", "arguments", "rest"] = "section" if section.bare else "content"

    def feed(self, text: str, last: bool) -> Sequence[Part]:
        parts: list[Part] = []
        self._text += text
        steps = {
            "content": self._content, "section": self._in_section, "arguments": self._arguments, "rest": self._rest
        }  # fmt: skip
        while steps[self._where](parts, last):
            pass
        return joined(parts)

    def _content(self, parts: list[Part], last: bool) -> bool:
        """Each step: whether another may follow without more text."""
        text = self._text
        at = min((at for begin in self._section.begins if (at := text.find(begin)) >= 0), default=None)
        if at is not None:
            shown = text[:at].rstrip()
            self._say(shown, parts)
            self._untold, self._text, self._bare, self._called = text[len(shown) : at], text[at:], False, False
            self._where = "section"
            return True
        end = len(text) if last else len(text) - held_back(text, self._section.begins)
        if self._count or not last:
            end = len(text[:end].rstrip())
        self._say(text[:end], parts)
        self._text = text[end:]
        return False

    def _in_section(self, parts: list[Part], last: bool) -> bool:
        text = self._text
        if self._bare and not last and held_back(text, self._section.begins) == len(text) > 0:
            return False
        self._bare = self._bare and not text.startswith(tuple(self._section.begins))
        place = self._section.place(text, last, self._bare) if text else None
        if place is None:
            if not last:
                return False
            place = Foreign(len(text))
        match place:
            case Head(name, end, call_id, enclosed):
                self._begin(name, call_id, parts)
                self._object, self._enclosed, self._where = _Object(), enclosed, "arguments"
            case Whole(calls, end):
                for name, arguments in calls:
                    self._begin(name, None, parts)
                    self._tell(CallPart(self._count - 1, None, arguments, whole=True), parts)
            case Gap(end):
                self._untold += text[:end]
            case End(end):
                self._say("" if self._called else self._untold + text[:end], parts)
                self._where = "content"
            case Foreign(end):
                self._say(self._open_gap() + text[:end], parts)
                self._untold, self._where = "", "content"
        self._text = text[end:]
        return bool(self._text) or (last and self._where == "section")

    def _open_gap(self) -> str:
        """What of the untold is content where no call follows: behind a call not what closes it."""
        opening = self._untold.find("[") if self._called else 0
        return self._untold[opening:] if opening >= 0 else ""

    def _arguments(self, parts: list[Part], last: bool) -> bool:
        end = self._object.take(self._text)
        taken = self._text if end is None else self._text[:end]
        if taken:
            self._tell(CallPart(self._count - 1, None, taken, whole=end is not None), parts)
        self._text = "" if end is None else self._text[end:]
        if end is None:
            return False
        self._object = _Object(depth=1)
        self._where = "rest" if self._enclosed else "section"
        return True

    def _rest(self, parts: list[Part], last: bool) -> bool:
        """The keys behind the arguments; a brace that a model forgot is not waited for."""
        text = self._text.lstrip()
        if self._object.fresh and text and text[0] not in ",}":
            self._where = "section"
            return True
        end = self._object.take(text)
        self._text = "" if end is None else text[end:]
        if end is not None:
            self._where = "section"
        return end is not None

    def _begin(self, name: str, call_id: str | None, parts: list[Part]) -> None:
        self._untold, self._called = "", True
        self._count += 1
        if call_id is None or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        self._tell(CallPart(self._count - 1, name, "", call_id), parts)

    def _tell(self, part: CallPart, parts: list[Part]) -> None:
        if part.index == 0 or self._several:
            parts.append(part)

    def _say(self, text: str, parts: list[Part]) -> None:
        if text:
            parts.append(Content(text))


class _Object:
    """Follows the characters of one JSON object to its closing brace."""

    def __init__(self, depth: int = 0) -> None:
        self.fresh = True
        self._depth = depth
        self._in_string = self._escaped = False

    def take(self, text: str) -> int | None:
        """How many of these characters end the object; None: all are within it."""
        for at, character in enumerate(text):
            self.fresh = False
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


def object_end(text: str) -> int | None:
    """Where the JSON object that begins `text` ends; None: it does not yet."""
    depth = 0
    for found in _STRUCTURE.finditer(text):
        token = found[0]
        if token in "{[":
            depth += 1
        elif token in "}]":
            depth -= 1
            if depth == 0:
                return found.end()
    return None


_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[{}\[\]]', re.DOTALL)
