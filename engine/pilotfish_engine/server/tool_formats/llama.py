"""Llama 3.1 to 4: a call is the whole answer, as JSON or as a list in Python, with a tag before it or none.

{"name": "f", "parameters": {…}}; {…}     <|python_tag|>{"name": …}     [f(a=1), g()]     <|python_start|>[f()]
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.tool_formats.format import NAME, Format, JsonSpelling, Spelling, new_id
from pilotfish_engine.server.tool_formats.items import Objects, Tags
from pilotfish_engine.server.tool_formats.python_calls import ObjectsOrPython, Python, PythonSpelling, positions_of
from pilotfish_engine.server.tool_formats.reading import CallReader

_BEGINS = ("<|python_tag|>", "<|python_start|>")
_PASSED = ("<|python_end|>", "<|eom|>", "<|eot|>")
_TAGS = Tags(begins=_BEGINS, passed=_PASSED)
_JSON = JsonSpelling(start="", before=f'{{"name": "{NAME}", "parameters": ', after="}", joint="; ")
_PYTHON = PythonSpelling(start="", opening="[", joint=", ", end="]")


def _reader(functions: Sequence[Function], several: bool) -> CallReader:
    names = tuple(function.name for function in functions)
    python = Python(_TAGS, positions_of(functions), names, bare=True)
    return CallReader(ObjectsOrPython(Objects(_TAGS, names, bare=True), python), several, new_id)


def _json(template: str) -> Spelling:
    return _JSON


JSON = Format(
    name="llama3_json",
    families="Llama 3.1, 3.2, 3.3 and 4",
    knows=lambda template: "tools" in template and '"parameters":' in template,
    spelling=_json,
    reader=_reader,
    markers=(*_BEGINS, *_PASSED),
    aliases=("llama4_json", "llama3", "json"),
)
PYTHON = Format(
    name="pythonic",
    families="Llama 3.2 and 4, Gemma 3 with a template for it",
    knows=lambda template: "tools" in template and "func_name1(params_name1" in template,
    spelling=lambda template: _PYTHON,
    reader=_reader,
    markers=(*_BEGINS, *_PASSED),
    aliases=("llama4_pythonic",),
)
