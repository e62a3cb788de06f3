"""DeepSeek V3, R1 and V3.1: a section of calls, each with tags around its name and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import NAME, Format, JsonSpelling, Spelling, new_id
from pilotfish_engine.server.tool_formats.items import BLANKS, Named, Tags
from pilotfish_engine.server.tool_formats.reading import CallReader

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _SEP, _ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_SECTION = Named(
    Tags(begins=(_ALL,), passed=(_ONE_END, "```"), ends=(_ALL_END,), between=BLANKS),
    re.compile(rf"{_ONE}\s*(?:function\s*{_SEP}\s*)?(?P<name>[^\s<｜]{{1,256}})\s*(?:```json|{_SEP})\s*(?=\{{)"),
)
_OLDER = JsonSpelling(
    start=_ALL,
    before=f"{_ONE}function{_SEP}{NAME}\n```json\n",
    after=f"\n```{_ONE_END}",
    joint="\n",
    end=_ALL_END,
)
_NEWER = JsonSpelling(start=_ALL, before=f"{_ONE}{NAME}{_SEP}", after=_ONE_END, end=_ALL_END)


def _reader(functions: Sequence[Function], several: bool) -> CallReader:
    return CallReader(_SECTION, several, new_id)


def _spelling(template: str) -> Spelling:
    return _OLDER if "```json" in template else _NEWER


FORMAT = Format(
    name="deepseek",
    families="DeepSeek V3, R1 (JSON in a fence) and V3.1",
    knows=lambda template: _ALL in template,
    spelling=_spelling,
    reader=_reader,
    markers=(_ALL, _ALL_END, _ONE, _SEP, _ONE_END),
    aliases=("deepseek_v3", "deepseek_v31"),
)
