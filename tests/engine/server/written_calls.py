"""Answers as each family writes them, and what they say: texts, the content, and names and arguments of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish_engine.server.conversation import Function

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a ::= b"},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Function(name="get_weather", parameters=CITY)
TIME = Function(name="get_time")
FUNCTIONS = [WEATHER, TIME]


@dataclass(frozen=True)
class Written:
    format: str
    text: str
    content: str
    calls: Sequence[tuple[str, object]]


PARIS = '{"city": "Pa}r\\"\\u00efs \\\\", "x": [{}, "]"]}'
PARSED = {"city": 'Pa}r"ïs \\', "x": [{}, "]"]}
CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
ONE: list[tuple[str, object]] = [("get_weather", PARSED)]
TWO: list[tuple[str, object]] = [*ONE, ("get_time", {})]
EMPTY = '{"name": "get_time", "arguments": {}}'


def tag(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def fence(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def newer(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def section(calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def kimi(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def coder(name: str, **values: str) -> str:
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    said = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
    return f"<tool_call>{name}\n{said}</tool_call>"


def harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
PYTHON = "get_weather(city='Pa\\'r)is', days=-2, x=[{'a': None, \"b\": True}, (1, 2.5)])"
PYTHON_SAYS = ("get_weather", {"city": "Pa'r)is", "days": -2, "x": [{"a": None, "b": True}, [1, 2.5]]})
VALUE = 'two\nlines "with" </tag> {} '

WRITTEN = [
    Written("hermes", "just text, <tool and {}", "just text, <tool and {}", []),
    Written("hermes", tag(CALL), "", ONE),
    Written("hermes", f"Let me see. \n{tag(CALL)}\n{tag(EMPTY)} Done. ", "Let me see. Done.", TWO),
    Written("hermes", "<tool_call>" + CALL + tag(EMPTY), "", TWO),  # the closing tag forgotten
    Written("hermes", tag(CALL + "\n" + EMPTY), "", TWO),
    Written("hermes", tag(f"[{CALL}, {EMPTY}]"), "", TWO),
    Written("hermes", tag('{"name": "f", "parameters": {"a": 1}, "id": 7, "more": {"b": "}"}}'), "", [("f", {"a": 1})]),
    Written("hermes", tag('{"id": 7, "type": "function", "name": "f", "arguments": {"a": 1}}'), "", [("f", {"a": 1})]),
    Written("hermes", tag('{"type": "function", "function": ' + CALL + "}"), "", ONE),
    Written("hermes", tag('{"arguments": {"a": "ü"}, "name": "f"}'), "", [("f", {"a": "ü"})]),
    Written("hermes", tag('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", {"a": 1})]),
    Written("hermes", tag('{"name": "f"}') + tag('{"name": "f", "arguments": null}'), "", [("f", {}), ("f", {})]),
    Written("hermes", tag('{"name": "f", "arguments": [1]}'), tag('{"name": "f", "arguments": [1]}'), []),
    Written("hermes", tag("f(1)") + " so", tag("f(1)") + " so", []),
    Written("hermes", f"<tool_call>junk {tag(EMPTY)}", "<tool_call>junk ", TWO[1:]),
    Written("hermes", tag(""), tag(""), []),
    Written("hermes", tag('{"name": "\\ud800", "arguments": {}}'), tag('{"name": "\\ud800", "arguments": {}}'), []),
    Written("llama3_json", "just text {", "just text {", []),
    Written("llama3_json", CALL.replace("arguments", "parameters"), "", ONE),
    Written("llama3_json", " \n" + CALL + "; " + EMPTY + "\n", "", TWO),
    Written("llama3_json", f"<|python_tag|>{CALL}<|eom|>", "", ONE),
    Written("llama3_json", '{"type": "function", "name": "get_time", "parameters": {}}', "", TWO[1:]),
    Written("llama3_json", CALL + " Done.", "Done.", ONE),
    Written("llama3_json", '{"name": "Bob", "parameters": {"a": 1}}', '{"name": "Bob", "parameters": {"a": 1}}', []),
    Written("llama3_json", '{"city": {"name": 1}}', '{"city": {"name": 1}}', []),
    Written("llama3_json", '{"name": "get_time"}', '{"name": "get_time"}', []),
    Written("llama3_json", "[1, 2]", "[1, 2]", []),
    Written("llama3_json", " " * 3000 + "a", " " * 3000 + "a", []),
    Written("llama3_json", f"[{PYTHON}, get_time()]", "", [PYTHON_SAYS, TWO[1]]),
    Written("pythonic", f"[{PYTHON}, get_time()]", "", [PYTHON_SAYS, TWO[1]]),
    Written("pythonic", f"<|python_start|>[{PYTHON}]<|python_end|>", "", [PYTHON_SAYS]),
    Written("pythonic", '[get_weather("Rome", days=3)] ok', "ok", [("get_weather", {"city": "Rome", "days": 3})]),
    Written("pythonic", "[get_weathers(city=1)]", "[get_weathers(city=1)]", []),
    Written("pythonic", "[get_weather(city=open('x'))]", "[get_weather(city=open('x'))]", []),
    Written("pythonic", "get_weather is a function", "get_weather is a function", []),
    Written("gemma3", f"Sure.\n```tool_code\n{PYTHON}\nget_time()\n```\n", "Sure.", [PYTHON_SAYS, TWO[1]]),
    Written("gemma3", "```python\nx\n```", "```python\nx\n```", []),
    Written("gemma3", "```tool_code\nx = 1\n```", "```tool_code\nx = 1\n```", []),
    Written("olmo3", f"<function_calls>{PYTHON}\nget_time()</function_calls>", "", [PYTHON_SAYS, TWO[1]]),
    Written("mistral", f"[TOOL_CALLS] [{CALL}, {EMPTY}]", "", TWO),
    Written("mistral", f"Well [TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time[ARGS]{{}}", "Well", TWO),
    Written("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{PARIS}", "", ONE),
    Written("mistral", f"[TOOL_CALLS]get_weather{PARIS} and so on", "and so on", ONE),
    Written("mistral", "[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
    Written("mistral", f"[TOOL_CALLS][{CALL}]\n[1] says so", "[1] says so", ONE),
    Written("mistral", f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]no call", "[TOOL_CALLS]no call", ONE),
    Written("mistral", "[TOOL_CALLS", "[TOOL_CALLS", []),
    Written("deepseek", section(fence("get_weather", PARIS) + "\n" + fence("get_time", "{}")), "", TWO),
    Written(
        "deepseek", f"So:{section('<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>')}", "So:", TWO[1:]
    ),
    Written(
        "deepseek",
        section("<｜tool▁call▁begin｜>x<｜tool▁sep｜>1"),
        section("<｜tool▁call▁begin｜>x<｜tool▁sep｜>1"),
        [],
    ),
    Written("kimi_k2", "A" + kimi("get_time", 0, "{}").join(KIMI), "A", TWO[1:]),
    Written("kimi_k2", (kimi("get_weather", 3, PARIS) + kimi("get_time", 3, "{}")).join(KIMI), "", TWO),
    Written("granite", f"<|tool_call|>[{CALL}, {EMPTY}]", "", TWO),
    Written("granite", f"<tool_call>[{CALL}]", "", ONE),
    Written("phi4_mini", f"<|tool_call|>[{CALL}, {EMPTY}]<|/tool_call|>", "", TWO),
    Written("phi4_mini", f"functools[{CALL}]", "", ONE),
    Written("phi4_mini", "functools[3]", "functools[3]", []),
    Written(
        "qwen3_coder",
        "Yes.\n" + coder("get_weather", city=VALUE, days="3") + "\n" + coder("get_time"),
        "Yes.",
        [("get_weather", {"city": VALUE, "days": 3}), TWO[1]],
    ),
    Written(
        "qwen3_coder",
        coder("get_weather", city="12", x='{"a": [1]}', y="True", z="plain"),
        "",
        [("get_weather", {"city": "12", "x": {"a": [1]}, "y": True, "z": "plain"})],
    ),
    Written("qwen3_coder", coder("get_time")[len("<tool_call>\n") :], "", TWO[1:]),
    Written("qwen3_coder", "<tool_call>\nhm\n</tool_call>", "<tool_call>\nhm\n</tool_call>", []),
    Written(
        "glm45",
        "Yes.\n" + glm("get_weather", city=VALUE, days="3") + "\n" + glm("get_time"),
        "Yes.",
        [("get_weather", {"city": VALUE, "days": 3}), TWO[1]],
    ),
    Written(
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>X</arg_value></tool_call>",
        "",
        [("get_weather", {"city": "X"})],
    ),
    Written("glm45", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    Written("harmony", harmony("get_weather", PARIS), "", ONE),
    Written("harmony", "<|channel|>final<|message|>Hello<|return|>", "Hello", []),
    Written(
        "harmony",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant" + harmony("get_time", ""),
        "First.",
        TWO[1:],
    ),
    Written("harmony", "Just text", "Just text", []),
]
