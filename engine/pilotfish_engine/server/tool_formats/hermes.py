"""Hermes 2 and 3, Qwen 2.5 and 3, SmolLM 2 and 3, Granite 4: JSON in tags, alone or as a list.

<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import NAME, Format, JsonSpelling, new_id
from pilotfish_engine.server.tool_formats.items import Objects, Tags
from pilotfish_engine.server.tool_formats.reading import CallReader

BEGIN, END = "<tool_call>", "</tool_call>"
_SECTION = Objects(Tags(begins=(BEGIN,), ends=(END,)))
_SPELLING = JsonSpelling(
    start=BEGIN,
    opening="\n",
    before=f'{{"name": "{NAME}", "arguments": ',
    after="}\n" + END,
    joint=f"\n{BEGIN}\n",
)


def _reader(functions: Sequence[Function], several: bool) -> CallReader:
    return CallReader(_SECTION, several, new_id)


FORMAT = Format(
    name="hermes",
    families="Hermes 2 and 3, Qwen 2.5, Qwen 3, QwQ, SmolLM 2 and 3, Granite 4",
    knows=lambda template: BEGIN in template,
    spelling=lambda template: _SPELLING,
    reader=_reader,
    markers=(BEGIN, END),
    aliases=("qwen25", "qwen3"),
)
