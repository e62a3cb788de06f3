"""What chat templates may use beside plain Jinja, rendered here and by the reference library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pilotfish_engine.tokenizer import ChatTemplate, TemplateError
from tests.engine.tokenizer.families import save_folder

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be terse: <b> & 'c'."},
    {"role": "user", "content": "Wie heißt 你好?", "name": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"city": "Zürich", "n": 1}}}],
    },
    {"role": "tool", "content": '{"t": 1}', "tool_call_id": "1"},
    {"role": "user", "content": "  and?\n"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Météo", "parameters": {"type": "object"}}}]

TEMPLATES = {
    "json": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages[0] | tojson(ensure_ascii=True) }}",
    "json options": "{{ messages[2].tool_calls | tojson(separators=(',', ':'), sort_keys=True, ensure_ascii=False) }}",
    "loops": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}"
        "{% if loop.first %}{% continue %}{% endif %}{{ loop.index0 }}{{ m.role }}{% endfor %}"
    ),
    "namespaces": (
        "{% set ns = namespace(n=0, names=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.names = ns.names + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.names | join(',') }}"
    ),
    "macros": (
        "{% macro show(m, end='!') %}[{{ m.role }}{{ end }}]{% endmacro %}"
        "{{ show(messages[0]) }}{{ show(messages[1], '') }}"
    ),
    "generation": "{% for m in messages %}{% generation %}<{{ m.role }}>{% endgeneration %}\n{% endfor %}",
    "trimmed": (
        "{% for m in messages %}\n    {% if m.content %}\n    {{ m.content | trim }}\n    {% endif %}\n"
        "{% endfor %}\nend\n"
    ),
    "whitespace": "{%- for m in messages -%}\n  {{- m['role'] -}}\n{%- endfor %}  x",
    "missing": (
        "{{ messages[2].content is defined }}{{ messages[1].name is defined }}{{ nothing }}"
        "{{ bos_token }}{{ eos_token }}"
    ),
    "strings": (
        "{{ messages[4].content.strip().split('a') }}{{ messages[1].content[-1:] }}{{ 'a' in messages[4].content }}"
        "{{ messages[0].content.startswith('Be') }}{{ messages[1]['content'] | upper | replace('?', '.') }}"
    ),
    "mappings": (
        "{% for k, v in messages[2].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
        "{{ dict(a=1).a }}{{ messages[2].get('x', 'none') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    ),
    "tests": "{{ messages is iterable }}{{ 'x' is string }}{{ none is none }}{{ messages[0] is mapping }}",
    "variables": "{{ enable_thinking }}{{ add_generation_prompt }}{{ documents }}{{ tools is none }}",
    "dates": "{{ strftime_now('%Y') | length }}",
    "calls": "{% call(x) f() %}{{ x }}{% endcall %}{% macro f() %}({{ caller(1) }}){% endmacro %}",
    "refusal": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
    "outside": "{{ messages.__class__ }}",
    "changes": "{% set _ = messages.append(1) %}",
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = save_folder("llama-2", tmp_path_factory.mktemp("chat"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("variables", [{"enable_thinking": False}, {"enable_thinking": True, "x": ["ü"]}])
def test_templates_render_as_in_the_reference(
    reference: PreTrainedTokenizerFast, name: str, variables: Mapping[str, Any]
) -> None:
    own = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    for tools in ([], TOOLS):
        asked = {"tools": tools or None, "tokenize": False, "add_generation_prompt": True, **variables}
        try:
            text = reference.apply_chat_template(MESSAGES, chat_template=TEMPLATES[name], **asked)
        except Exception as error:
            with pytest.raises(TemplateError, match=re.escape(str(error))):
                own.render(MESSAGES, tools, variables)
        else:
            assert own.render(MESSAGES, tools, variables) == text


def test_most_templates_are_not_refused() -> None:
    """So that the test above compares texts."""
    refused = [name for name, source in TEMPLATES.items() if not _renders(source)]
    assert refused == ["calls", "refusal", "changes"]


def _renders(source: str) -> bool:
    try:
        ChatTemplate(source, {}).render(MESSAGES, TOOLS)
    except TemplateError:
        return False
    return True


def test_tools_choose_their_template(tmp_path: Path) -> None:
    template = ChatTemplate("D{{ tools is none }}", {}, "T{{ tools | length }}")
    assert (template.render(MESSAGES), template.render(MESSAGES, TOOLS)) == ("DTrue", "T1")
    assert ChatTemplate("D", {}).source_for(tools=True) == "D"
