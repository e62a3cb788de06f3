"""Calls written as Python: f(a=1, b="x"), in a list or on lines of their own (Llama 3.2 and 4, Gemma 3, OLMo 3)."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import Specials, any_of, listed, literal, properties_of, spaced
from pilotfish_engine.server.tool_formats.items import Objects, Tags, dumped, named
from pilotfish_engine.server.tool_formats.reading import Foreign, Place, Whole

_CALL = re.compile(r"([A-Za-z_][\w.-]{0,127})[ \t]{0,8}\(")
_PART = re.compile(r"[A-Za-z_][\w.-]{0,127}[ \t]{0,8}")
_STRUCTURE = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"""|\Z)|\'\'\'(?:[^\\]|\\.)*?(?:\'\'\'|\Z)'
    r'|"(?:[^"\\]|\\.)*(?:"|\Z)|\'(?:[^\'\\]|\\.)*(?:\'|\Z)|[()\[\]{}]',
    re.DOTALL,
)
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_MAX_CHARACTERS = 1 << 18  # of one call


@dataclass(frozen=True)
class Python:
    """positions: the parameters' names of each function in order, for arguments without one. names: those that a bare
    call may have."""

    tags: Tags
    positions: Mapping[str, Sequence[str]]
    names: Collection[str] = ()
    bare: bool = False

    @property
    def begins(self) -> Sequence[str]:
        return self.tags.begins

    def place(self, text: str, last: bool, bare: bool) -> Place | None:
        around = self.tags.around(text, last, bare)
        if around is not None:
            return around
        match = _CALL.match(text)
        if match is None:
            partly = _PART.fullmatch(text) is not None and not (bare and self._strange(text))
            if not last and (partly or self.tags.opens(text)):
                return None
            return Foreign(0) if bare else self.tags.foreign(text)
        if bare and match[1] not in self.names:
            return Foreign(0)
        end = _call_end(text, match.end() - 1)
        if end is None:
            return None
        arguments = self._arguments(match[1], text[match.start() : end])
        if arguments is None:
            return Foreign(0) if bare else self.tags.foreign(text)
        return Whole([(match[1], arguments)], end)

    def _strange(self, text: str) -> bool:
        return not any(name.startswith(text.strip()) for name in self.names)

    def _arguments(self, name: str, text: str) -> str | None:
        """Of a call's source, as JSON; None: they are none."""
        if len(text) > _MAX_CHARACTERS:
            return None
        text = "f" + text[len(name) :]  # a name may have hyphens
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes that are none
                call = ast.parse(text.strip(), mode="eval").body
            if not isinstance(call, ast.Call):
                return None
            positions = self.positions.get(name, ())
            if len(call.args) > len(positions):
                return None
            given = dict(zip(positions, map(_value, call.args), strict=False))
            for keyword in call.keywords:
                if keyword.arg is None:
                    given |= _value(keyword.value)
                else:
                    given[keyword.arg] = _value(keyword.value)
            return dumped(given)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None


@dataclass(frozen=True)
class ObjectsOrPython:
    """Llama's two ways: JSON objects, and a list of calls in Python."""

    objects: Objects
    python: Python

    @property
    def begins(self) -> Sequence[str]:
        return self.objects.begins

    @property
    def bare(self) -> bool:
        return self.objects.bare

    def place(self, text: str, last: bool, bare: bool) -> Place | None:
        around = self.objects.tags.around(text, last, bare)
        if around is not None:
            return around
        section = self.python if _PART.match(text) else self.objects
        return section.place(text, last, bare)


def _call_end(text: str, opening: int) -> int | None:
    depth = 0
    for found in _STRUCTURE.finditer(text, opening):
        if found[0] in "([{":
            depth += 1
        elif found[0] in ")]}":
            depth -= 1
            if depth == 0:
                return found.end()
    return None


def _value(node: ast.expr) -> Any:
    """Raises ValueError for what is no value."""
    match node:
        case ast.Constant(value) if isinstance(value, str | int | float | bool | None):
            return value
        case ast.Name(name) if name.lower() in _CONSTANTS:
            return _CONSTANTS[name.lower()]
        case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, operand):
            number = _value(operand)
            if type(number) not in (int, float):
                raise ValueError("no number")
            return -number if isinstance(sign, ast.USub) else number
        case ast.List(elements) | ast.Tuple(elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys, values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no value")


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _value(node)
    if not named(key):
        raise ValueError("no key")
    return str(key)


@dataclass(frozen=True)
class PythonSpelling:
    """Arguments have names, and values that are JSON, which the reader takes for Python."""

    start: str
    opening: str = ""
    joint: str = ", "
    end: str = ""

    def rules(self, functions: Sequence[Function], several: bool, specials: Specials) -> list[str]:
        joint = literal(self.joint, specials)
        calls = f"call ({joint} call)*" if several else "call"
        rules = [f"calls: {calls} {literal(self.end, specials)}", any_of("call", len(functions))]
        for number, function in enumerate(functions):
            properties, required, other = properties_of(function)
            usable = {name: schema for name, schema in properties.items() if name.isidentifier()}
            each = [
                (f"{literal(name + '=', {})} %json {spaced(schema)}", name in required)
                for name, schema in usable.items()
            ]
            rules += listed(f"arguments_{number}", each, '", "')
            if other:
                rules[-1] = f'arguments_{number}: (pair (", " pair)*)?'
                rules.append('pair: /[a-z_][a-z0-9_]{0,31}/ "=" %json {}')
            rules.append(f'call_{number}: {literal(function.name + "(", {})} arguments_{number} ")"')
        return rules


def positions_of(functions: Sequence[Function]) -> Mapping[str, Sequence[str]]:
    schemas = {function.name: (function.parameters or {}).get("properties") for function in functions}
    return {name: list(listed) if isinstance(listed, dict) else [] for name, listed in schemas.items()}
