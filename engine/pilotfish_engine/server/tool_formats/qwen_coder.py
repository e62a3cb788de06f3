"""Qwen3-Coder: a tag around the call, its function and each of its arguments.

<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import Format, new_id
from pilotfish_engine.server.tool_formats.items import BLANKS, Tags
from pilotfish_engine.server.tool_formats.reading import CallReader
from pilotfish_engine.server.tool_formats.tagged_arguments import Tagged, TaggedSpelling, schemas_of

_BEGIN, _END = "<tool_call>", "</tool_call>"
_TAGS = Tags(begins=(_BEGIN,), ends=(_END,), between=BLANKS)
_CALL = re.compile(
    r"<function=(?P<name>[^>\n]{1,256})>(?P<arguments>(?:(?!</tool_call>|<tool_call>).)*?)</function>", re.DOTALL
)
_ARGUMENT = re.compile(
    r"<parameter=(?P<key>[^>\n]{1,256})>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)
_SPELLING = TaggedSpelling(
    start=_BEGIN,
    opening="\n",
    before="<function=",
    behind=">\n",
    key_before="<parameter=",
    key_behind=">\n",
    value_behind="\n</parameter>\n",
    end="</function>\n" + _END,
    joint=f"\n{_BEGIN}\n",
)


def _reader(functions: Sequence[Function], several: bool) -> CallReader:
    section = Tagged(_TAGS, _CALL, _ARGUMENT, schemas_of(functions), opens=("<function=",))
    return CallReader(section, several, new_id)


FORMAT = Format(
    name="qwen3_coder",
    families="Qwen3-Coder",
    knows=lambda template: _BEGIN in template and "<function=" in template,
    spelling=lambda template: _SPELLING,
    reader=_reader,
    markers=(_BEGIN, _END),
    aliases=("qwen3_xml",),
)
