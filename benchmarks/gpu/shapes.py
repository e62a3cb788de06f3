"""Checkpoints of real shapes without their files: names and sizes on disk, the weights drawn on the device."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pilotfish_engine.model.families import shape_from_config
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsFolder

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
HEAD_8B: dict[str, Any] = {
    **LLAMA_8B,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "rope_scaling": None,
}


def target(folder: Path, config: Mapping[str, Any] = LLAMA_8B) -> Path:
    sizes = dict(shape_from_config(dict(config), "a shape").tensor_shapes())
    return _write(folder, config, {name: ("BF16", size) for name, size in sizes.items()})


def head(folder: Path, config: Mapping[str, Any] = HEAD_8B) -> Path:
    """An EAGLE-3 head of one layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {name: ("BF16", size) for name, size in sizes.items()}
    tensors["d2t"] = ("I64", (config["draft_vocab_size"],))
    return _write(folder, config, tensors)


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Path:
    """A file with a hole where the numbers would be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (dtype, size) in tensors.items():
        begin, end = end, end + prod(size) * (8 if dtype == "I64" else 2)
        header[name] = {"dtype": dtype, "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@contextmanager
def random_weights(device: torch.device) -> Iterator[None]:
    """Whatever is read meanwhile is drawn: matrices by their width, norms about one."""

    def read(folder: SafetensorsFolder, name: str) -> torch.Tensor:
        size = folder.tensor_shapes[name]
        drawn = torch.randn(size, dtype=torch.bfloat16, device=device)
        return 1 + 0.1 * drawn if len(size) == 1 else drawn * size[-1] ** -0.5

    with patch.object(SafetensorsFolder, "read", read):
        yield
