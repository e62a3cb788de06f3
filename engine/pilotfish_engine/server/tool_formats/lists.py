"""Granite 3 and Phi-4-mini: a tag, and behind it a list of JSON objects.

<|tool_call|>[{"name": "f", "arguments": {…}}]     functools[{"name": "f", "arguments": {…}}]
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import NAME, Format, JsonSpelling, new_id
from pilotfish_engine.server.tool_formats.items import Objects, Tags
from pilotfish_engine.server.tool_formats.reading import CallReader

_BEGIN, _END = "<|tool_call|>", "<|/tool_call|>"
_ONE = f'{{"name": "{NAME}", "arguments": '
_GRANITE = Objects(Tags(begins=(_BEGIN, "<tool_call>"), passed=("</tool_call>",)))
_PHI = Objects(Tags(begins=(_BEGIN, "functools["), passed=(_END,)))


def _granite(functions: Sequence[Function], several: bool) -> CallReader:
    return CallReader(_GRANITE, several, new_id)


def _phi(functions: Sequence[Function], several: bool) -> CallReader:
    return CallReader(_PHI, several, new_id)


GRANITE = Format(
    name="granite",
    families="Granite 3.0 to 3.3",
    knows=lambda template: _BEGIN in template,
    spelling=lambda template: JsonSpelling(start=_BEGIN, opening="[", before=_ONE, after="}", joint=", ", end="]"),
    reader=_granite,
    markers=(_BEGIN,),
)
PHI = Format(
    name="phi4_mini",
    families="Phi-4-mini",
    knows=lambda template: "<|tool|>" in template or "functools[" in template,
    spelling=lambda template: JsonSpelling(
        start=_BEGIN, opening="[", before=_ONE, after="}", joint=", ", end="]" + _END
    ),
    reader=_phi,
    markers=(_BEGIN, _END),
    aliases=("phi4_mini_json",),
)
