"""What an answer's text is made of: reasoning, content and calls of tools, in their order.

A reader is fed an answer's text in pieces of any size; what its parts add up to does not depend on how it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallPart:
    """Of call number `index`: its name and id, in its first part only, and the next characters of its arguments' JSON.

    whole: no more of its arguments comes, and they are JSON."""

    index: int
    name: str | None
    arguments: str
    id: str | None = None
    whole: bool = False


Part = Reasoning | Content | CallPart


class Reader(Protocol):
    @property
    def reasoned(self) -> int:
        """How many characters of the text so far are reasoning, or come before it ends. Its tags are counted."""
        ...

    def feed(self, text: str, last: bool) -> Sequence[Part]:
        """`last`: no more text comes."""
        ...


class ContentReader:
    """All is content."""

    reasoned = 0

    def feed(self, text: str, last: bool) -> Sequence[Part]:
        return [Content(text)] if text else []


def joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbours that say more of the same become one."""
    found: list[Part] = []
    for part in parts:
        before = found[-1] if found else None
        match before, part:
            case Content(text), Content(more):
                found[-1] = Content(text + more)
            case Reasoning(text), Reasoning(more):
                found[-1] = Reasoning(text + more)
            case CallPart(), CallPart(name=None) if before.index == part.index:
                arguments, whole = before.arguments + part.arguments, before.whole or part.whole
                found[-1] = replace(before, arguments=arguments, whole=whole)
            case _:
                found.append(part)
    return found
