"""gpt-oss' answers (https://github.com/openai/harmony): messages with a channel each, and calls that are messages.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f …<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.parts import CallPart, Content, Part, Reasoning, joined
from pilotfish_engine.server.tool_formats.format import Format, Specials, any_of, literal, new_id, schema_of
from pilotfish_engine.server.tool_formats.items import loaded
from pilotfish_engine.tokenizer import held_back

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
MARKERS = (CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]{1,256})")
_OPENS = (CHANNEL, START, "assistant", "to=")
_KNOWN = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader:
    """Analysis is reasoning; what is said to a function is a call; every other message is content."""

    def __init__(self, several: bool) -> None:
        self._several = several
        self.reasoned = 0
        self._fed = 0
        self._count = 0
        self._text = ""
        self._arguments = ""
        self._where: Literal["header", "reasoning", "content", "call"] = "header"

    def feed(self, text: str, last: bool) -> Sequence[Part]:
        parts: list[Part] = []
        self._text += text
        self._fed += len(text)
        while self._header(parts, last) if self._where == "header" else self._body(parts, last):
            pass
        if last and self._where == "call" and self._arguments:  # its end tag ends the answer as well
            self._end_call(parts)
        return joined(parts)

    def _header(self, parts: list[Part], last: bool) -> bool:
        text = self._text
        if not text:
            return False
        said = text.lstrip()
        if said and not any(said.startswith(each) or each.startswith(said) for each in _OPENS):
            self._where = "content"  # a model that does not keep to the form
            return True
        header, message, body = text.partition(MESSAGE)
        if not message:
            if last and CHANNEL not in text and START not in text:
                self._where = "content"
                return True
            return False
        self._text = body
        recipient, channel = _RECIPIENT.search(header), _KNOWN.search(header)
        if recipient is not None:
            self._where, self._arguments = "call", ""
            self._count += 1
            self._tell(CallPart(self._count - 1, recipient[1], "", new_id()), parts)
        else:
            self._where = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        return True

    def _body(self, parts: list[Part], last: bool) -> bool:
        text = self._text
        ends = [(at, end) for end in ENDS if (at := text.find(end)) >= 0]
        held = held_back(text, ENDS) if self._where == "call" or not last else 0  # a cut tag is no argument
        at, end = min(ends, default=(len(text) - held, ""))
        said = text[:at]
        if said and self._where == "call":
            self._arguments += said
            self._tell(CallPart(self._count - 1, None, said), parts)
        elif said:
            parts.append(Reasoning(said) if self._where == "reasoning" else Content(said))
        self._text = text[at:] if end in ("", START) else text[at + len(end) :]
        if self._where == "reasoning":
            self.reasoned = self._fed - len(self._text)
        if not end:
            return False
        if self._where == "call":
            self._end_call(parts)
        self._where = "header"
        return True

    def _end_call(self, parts: list[Part]) -> None:
        if not self._arguments.strip():
            self._arguments = "{}"
            self._tell(CallPart(self._count - 1, None, "{}", whole=True), parts)
        elif isinstance(loaded(self._arguments), dict):
            self._tell(CallPart(self._count - 1, None, "", whole=True), parts)

    def _tell(self, part: CallPart, parts: list[Part]) -> None:
        if part.index == 0 or self._several:
            parts.append(part)


@dataclass(frozen=True)
class _HarmonySpelling:
    """Calls behind an analysis or none; the last ends with the answer's end token."""

    start: str = ""
    opening: str = ""

    def rules(self, functions: Sequence[Function], several: bool, specials: Specials) -> list[str]:
        def lark(text: str) -> str:
            return literal(text, specials)

        thought = lark(f"{CHANNEL}analysis{MESSAGE}") + " /(.|\\n)*/ " + lark(f"<|end|>{START}assistant")
        rules = ["calls: thought? call", f"thought: {thought}", any_of("call", len(functions))]
        for number, function in enumerate(functions):
            header = lark(f"{CHANNEL}commentary to=functions.{function.name} <|constrain|>json{MESSAGE}")
            rules.append(f"call_{number}: {header} %json {schema_of(function)}")
        return rules


def _reader(functions: Sequence[Function], several: bool) -> HarmonyReader:
    return HarmonyReader(several)


FORMAT = Format(
    name="harmony",
    families="gpt-oss",
    knows=lambda template: CHANNEL in template and START in template,
    spelling=lambda template: _HarmonySpelling(),
    reader=_reader,
    markers=MARKERS,
    aliases=("openai", "gpt_oss"),
)
