"""GLM-4.5 and later: a name, and tags around each argument's key and value.

<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>
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
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_TAGS = Tags(begins=(_BEGIN,), ends=(_END,), between=BLANKS)
_CALL = re.compile(
    r"(?P<name>[^\s<{]{1,256})\s*(?P<arguments>(?:(?!</tool_call>|<tool_call>).)*)(?=</tool_call>)", re.DOTALL
)
_ARGUMENT = re.compile(rf"{_KEY}(?P<key>[^<]{{1,256}}){_KEY_END}\s*{_VALUE}(?P<value>.*?){_VALUE_END}", re.DOTALL)
_SPELLING = TaggedSpelling(
    start=_BEGIN,
    before="",
    behind="\n",
    key_before=_KEY,
    key_behind=f"{_KEY_END}\n{_VALUE}",
    value_behind=_VALUE_END + "\n",
    end=_END,
    joint="\n" + _BEGIN,
)


def _reader(functions: Sequence[Function], several: bool) -> CallReader:
    return CallReader(Tagged(_TAGS, _CALL, _ARGUMENT, schemas_of(functions)), several, new_id)


FORMAT = Format(
    name="glm45",
    families="GLM-4.5 and 4.6",
    knows=lambda template: _KEY in template,
    spelling=lambda template: _SPELLING,
    reader=_reader,
    markers=(_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
    aliases=("glm47",),
)
