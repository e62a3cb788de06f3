"""Calls with tags around each argument: <function=f><parameter=a>… (Qwen3-Coder), f<arg_key>a</arg_key>… (GLM-4.5).

A value has no quotes: whether it is a string or JSON, the parameters' schema says.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import Specials, any_of, listed, literal, properties_of, spaced
from pilotfish_engine.server.tool_formats.items import Tags, dumped, loaded
from pilotfish_engine.server.tool_formats.reading import Place, Whole

_CONSTANTS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Tagged:
    """call: a whole one, with the groups `name` and `arguments`. argument: one of them, with `key` and `value`. opens:
    what a call begins with, beside the tags. schemas: each function's parameters."""

    tags: Tags
    call: re.Pattern[str]
    argument: re.Pattern[str]
    schemas: Mapping[str, Mapping[str, Any]]
    opens: tuple[str, ...] = ()
    bare: bool = False

    @property
    def begins(self) -> Sequence[str]:
        return (*self.tags.begins, *self.opens)

    def place(self, text: str, last: bool, bare: bool) -> Place | None:
        match = self.call.match(text)
        if match is None:
            return self.tags.around(text, last, bare) or self.tags.foreign(text)
        name, written = match["name"].strip(), match["arguments"]
        if self.argument.sub("", written).strip():  # neither an argument nor blank
            return self.tags.foreign(text)
        listed = self.schemas.get(name, {}).get("properties")
        types = listed if isinstance(listed, dict) else {}
        given = {
            each["key"].strip(): value_of(each["value"], types.get(each["key"].strip()))
            for each in self.argument.finditer(written)
        }
        return Whole([(name, dumped(given))], match.end())


def value_of(text: str, schema: Any) -> Any:
    """What is written without quotes: a string where the schema has only strings, else JSON if it is some."""
    if _only_strings(schema):
        return text
    trimmed = text.strip()
    value = loaded(trimmed)
    if value is not None or trimmed == "null":
        return value
    if trimmed in _CONSTANTS:
        return _CONSTANTS[trimmed]
    if trimmed[:1] in ("[", "{"):  # models write Python where they mean JSON
        try:
            found = ast.literal_eval(trimmed)
            dumped(found)
            return found
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            pass
    return text


def _only_strings(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    if kinds is None:
        members = schema.get("anyOf") or schema.get("oneOf") or []
        if isinstance(members, list) and members:
            return all(_only_strings(member) for member in members)
        choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        return isinstance(choices, list) and bool(choices) and all(isinstance(choice, str) for choice in choices)
    return kinds in ("string", ["string"])


def schemas_of(functions: Sequence[Function]) -> Mapping[str, Mapping[str, Any]]:
    return {function.name: function.parameters or {} for function in functions}


@dataclass(frozen=True)
class TaggedSpelling:
    """opening before NAME behind, then key_before KEY key_behind VALUE value_behind for each argument, then end. A
    string ends where `value_behind` begins; of its schema only `enum` and `const` are enforced."""

    start: str
    before: str
    behind: str
    key_before: str
    key_behind: str
    value_behind: str
    end: str
    joint: str
    opening: str = ""

    def rules(self, functions: Sequence[Function], several: bool, specials: Specials) -> list[str]:
        def lark(text: str) -> str:
            return literal(text, specials)

        calls = f"call ({lark(self.joint)} call)*" if several else "call"
        ending = re.escape(self.value_behind).replace("/", "\\/").replace("\n", "\\n").replace("\\\\n", "\\n")
        words = f"words[lazy]: /(.|\\n)*{ending}/"
        if any(special in self.value_behind for special in specials):  # which no text is
            words = f"words: /(.|\\n)*/ {lark(self.value_behind)}"
        rules = [f"calls: {calls}", any_of("call", len(functions)), words]
        for number, function in enumerate(functions):
            properties, required, other = properties_of(function)
            each = [
                (f"{lark(self.key_before + key + self.key_behind)} {self._value(schema, lark)}", key in required)
                for key, schema in properties.items()
            ]
            rules += listed(f"arguments_{number}", each, "")
            if other:
                rules[-1] = f"arguments_{number}: pair_{number}*"
                key = f"{lark(self.key_before)} /[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ {lark(self.key_behind)}"
                rules.append(f"pair_{number}: {key} words")
            call = f"{lark(self.before + function.name + self.behind)} arguments_{number} {lark(self.end)}"
            rules.append(f"call_{number}: {call}")
        return rules

    def _value(self, schema: Any, lark: Callable[[str], str]) -> str:
        if not _only_strings(schema):
            return f"%json {spaced(schema)} {lark(self.value_behind)}"
        choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        if not choices:
            return "words"
        return "(" + " | ".join(lark(choice) for choice in choices) + f") {lark(self.value_behind)}"
