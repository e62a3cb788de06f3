"""Kimi K2: calls are numbered over the whole chat, and their number is their id.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import NAME, NUMBER, Format, JsonSpelling, new_id
from pilotfish_engine.server.tool_formats.items import BLANKS, Named, Tags
from pilotfish_engine.server.tool_formats.reading import CallReader

_ALL, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ONE, _SEP, _ONE_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_SECTION = Named(
    Tags(begins=(_ALL,), passed=(_ONE_END,), ends=(_ALL_END,), between=BLANKS),
    re.compile(
        re.escape(_ONE)
        + r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]{1,256}?)(?::\d{1,9})?)\s*"
        + re.escape(_SEP)
        + r"\s*(?=\{)"
    ),
)
_SPELLING = JsonSpelling(start=_ALL, before=f"{_ONE}functions.{NAME}:{NUMBER}{_SEP}", after=_ONE_END, end=_ALL_END)


def _reader(functions: Sequence[Function], several: bool) -> CallReader:
    return CallReader(_SECTION, several, new_id)


FORMAT = Format(
    name="kimi_k2",
    families="Kimi K2",
    knows=lambda template: _ALL in template,
    spelling=lambda template: _SPELLING,
    reader=_reader,
    markers=(_ALL, _ALL_END, _ONE, _SEP, _ONE_END),
)
