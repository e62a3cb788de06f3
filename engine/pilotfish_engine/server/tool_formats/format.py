"""What one family's way of writing calls is, and the grammar (Lark, of llguidance) that enforces it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pilotfish_engine.messages import SPACES
from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.parts import Reader
from pilotfish_engine.server.schemas import plain

NAME, CALL_ID, NUMBER = "\0name\0", "\0id\0", "\0number\0"  # within a spelling
_PATTERNS = {CALL_ID: "/[a-zA-Z0-9]{9}/", NUMBER: "/[0-9]{1,3}/"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Specials = Mapping[str, int]  # special tokens, which have no text in an answer otherwise, by what they stand for


class Spelling(Protocol):
    """start: how calls begin, which tells them from other text; empty where nothing does. opening: what follows it."""

    @property
    def start(self) -> str: ...

    @property
    def opening(self) -> str: ...

    def rules(self, functions: Sequence[Function], several: bool, specials: Specials) -> list[str]:
        """Lark rules, of which `calls` is all that follows `opening`. A function without parameters takes none."""
        ...


@dataclass(frozen=True)
class Format:
    """knows: whether a chat template shows this way. markers: tags that may be special tokens, and are read.
    reader: by the functions offered and whether several calls may be told. new_id: of a call, where the model writes
    none."""

    name: str
    families: str
    knows: Callable[[str], bool]
    spelling: Callable[[str], Spelling]
    reader: Callable[[Sequence[Function], bool], Reader]
    markers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class JsonSpelling:
    """Names and JSON: start opening before-arguments-after joint before-arguments-after … end."""

    start: str
    before: str
    after: str = ""
    joint: str = ""
    opening: str = ""
    end: str = ""

    def rules(self, functions: Sequence[Function], several: bool, specials: Specials) -> list[str]:
        def lark(text: str) -> str:
            return literal(text, specials)

        calls = f"call ({lark(self.joint)} call)*" if several else "call"
        rules = [f"calls: {calls} {lark(self.end)}", any_of("call", len(functions))]
        for number, function in enumerate(functions):
            before = lark(self.before.replace(NAME, function.name))
            rules.append(f"call_{number}: {before} %json {schema_of(function)} {lark(self.after)}")
        return rules


def any_of(rule: str, count: int) -> str:
    return f"{rule}: " + " | ".join(f"{rule}_{number}" for number in range(count))


def schema_of(function: Function) -> str:
    return spaced(_NO_PARAMETERS if function.parameters is None else plain(function.parameters))


def spaced(schema: Any) -> str:
    """A schema's JSON, with the engine's rule for blanks."""
    return json.dumps(SPACES | schema if isinstance(schema, dict) else schema)


def properties_of(function: Function) -> tuple[Mapping[str, Any], Sequence[str], bool]:
    """The parameters one by one, and the names of those that must be there. Then whether others may be."""
    schema = plain(function.parameters or {})
    named, required = schema.get("properties"), schema.get("required")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = {
        name: shared | own if shared and isinstance(own, dict) else own
        for name, own in (named.items() if isinstance(named, dict) else ())
    }
    known = [name for name in required if name in properties] if isinstance(required, list) else []
    other = not properties and function.parameters is not None and schema.get("additionalProperties") is not False
    return properties, known, other


def listed(rule: str, each: Sequence[tuple[str, bool]], joint: str) -> list[str]:
    """Lark rules for arguments in their order, with `joint` between: what one is, and whether it must be there."""
    if not each:
        return [f'{rule}: ""']
    rules = [f"{rule}: {rule}_0_none"]
    for at, (argument, must) in enumerate(each):
        rules.append(f"{rule}_{at}: {argument}")
        for before, between in (("none", ""), ("some", joint + " ")):
            following = f"{rule}_{at + 1}_" if at + 1 < len(each) else None
            here = f"{between}{rule}_{at}" + ("" if following is None else f" {following}some")
            left_out = '""' if following is None else following + before
            rules.append(f"{rule}_{at}_{before}: {here}" + ("" if must else f" | {left_out}"))
    return rules


def literal(text: str, specials: Specials) -> str:
    """Of a text, as Lark: strings, special tokens and what stands for something else. May be empty."""
    marks = [*specials, *_PATTERNS]
    found = []
    for part in re.split("(" + "|".join(map(re.escape, marks)) + ")", text):
        if part in _PATTERNS:
            found.append(_PATTERNS[part])
        elif part in specials:
            found.append(f"<[{specials[part]}]>")
        elif part:
            found.append(json.dumps(part, ensure_ascii=False))
    return " ".join(found) or '""'


def new_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def short_id() -> str:
    """Nine letters and digits: Mistral's templates take no others."""
    return uuid.uuid4().hex[:9]
