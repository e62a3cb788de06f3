"""A tiny target with a byte-level tokenizer and a chat template, and prompts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, HIDDEN = 8, 32
LETTERS = "abcdefghijklmnopqrstuvwxyz <>/"
SPECIAL = ["<end>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 30,
    "initializer_range": 0.4,
}


def write_target(folder: Path, seed: int = 0, **fields: Any) -> Path:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(CONFIG | fields)))
    model.save_pretrained(folder)
    letters = {("Ġ" if letter == " " else letter): number for number, letter in enumerate(LETTERS)}
    first = len(letters)
    added = [
        {"id": first + number, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for number, name in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_prompts(path: Path, count: int, seed: int = 0) -> Path:
    generator = torch.Generator().manual_seed(seed)
    with path.open("w") as file:
        for _ in range(count):
            letters = torch.randint(0, 26, (6,), generator=generator).tolist()
            text = "".join(LETTERS[letter] for letter in letters)
            file.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
    return path
