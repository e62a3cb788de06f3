"""Gemma 3 and OLMo 3: calls in Python between tags, in a list or on lines of their own.

```tool_code\\nf(a=1)\\n```     <function_calls>f(a=1)\\ng()</function_calls>
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import Format, new_id
from pilotfish_engine.server.tool_formats.items import Tags
from pilotfish_engine.server.tool_formats.python_calls import Python, PythonSpelling, positions_of
from pilotfish_engine.server.tool_formats.reading import CallReader


def _format(name: str, families: str, begin: str, end: str, sign: str) -> Format:
    tags = Tags(begins=(begin,), ends=(end,))

    def reader(functions: Sequence[Function], several: bool) -> CallReader:
        return CallReader(Python(tags, positions_of(functions)), several, new_id)

    return Format(
        name=name,
        families=families,
        knows=lambda template: sign in template,
        spelling=lambda template: PythonSpelling(start=begin, opening="\n", joint="\n", end="\n" + end),
        reader=reader,
        markers=(begin, end),
    )


GEMMA = _format("gemma3", "Gemma 3 with a template for it", "```tool_code", "```", "tool_code")
OLMO = _format("olmo3", "OLMo 3", "<function_calls>", "</function_calls>", "<function_calls>")
