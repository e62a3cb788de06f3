"""Mistral: a special token, and behind it a list of JSON objects, or, newer, a name and its arguments each time.

[TOOL_CALLS][{"name": "f", "arguments": {…}}]     [TOOL_CALLS]f[ARGS]{…}     [TOOL_CALLS]f[CALL_ID]…[ARGS]{…}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import CALL_ID, NAME, Format, JsonSpelling, Spelling, short_id
from pilotfish_engine.server.tool_formats.items import Named, Objects, Tags
from pilotfish_engine.server.tool_formats.reading import CallReader, Place

_BEGIN = "[TOOL_CALLS]"
_HEADER = re.compile(
    r"(?P<name>[a-zA-Z0-9_.-]{1,256})\s*(?:\[CALL_ID\]\s*(?P<id>[a-zA-Z0-9]{9}))?\s*(?:\[ARGS\])?\s*(?=\{)"
)


@dataclass(frozen=True)
class _Section:
    objects: Objects
    named: Named

    @property
    def begins(self) -> Sequence[str]:
        return self.objects.begins

    @property
    def bare(self) -> bool:
        return False

    def place(self, text: str, last: bool, bare: bool) -> Place | None:
        section = self.objects if text.startswith("{") else self.named
        return section.place(text, last, bare)


_TAGS = Tags(begins=(_BEGIN,))
_SECTION = _Section(Objects(_TAGS), Named(_TAGS, _HEADER))


def _reader(functions: Sequence[Function], several: bool) -> CallReader:
    return CallReader(_SECTION, several, short_id)


def _spelling(template: str) -> Spelling:
    if "[ARGS]" not in template:
        one = f'{{"name": "{NAME}", "arguments": '
        return JsonSpelling(start=_BEGIN, opening=" [", before=one, after="}", joint=", ", end="]")
    call_id = f"[CALL_ID]{CALL_ID}" if "[CALL_ID]" in template else ""
    return JsonSpelling(start=_BEGIN, before=f"{NAME}{call_id}[ARGS]", joint=_BEGIN)


FORMAT = Format(
    name="mistral",
    families="Mistral 7B v0.3, Nemo, Small, Large, Devstral, Magistral",
    knows=lambda template: _BEGIN in template,
    spelling=_spelling,
    reader=_reader,
    markers=(_BEGIN, "[ARGS]", "[CALL_ID]"),
)
