"""A GGUF file of the `llama` architecture, each tensor dequantised to float32 when it is read.

GGUF stores Q and K permuted for interleaved rotation; `read` gives them back in the order of half rotation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model.shape import ModelShape, RopeShape, check_heads

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise CheckpointError(
                f"{path}: not a whole GGUF file of {path.stat().st_size} bytes ({error}); "
                "downloading it again would work"
            ) from error

    @cached_property
    def shape(self) -> ModelShape:
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise CheckpointError(f"{self.path}: architecture {architecture!r} is not supported; 'llama' would work")
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // heads)
        if (rotated := self._number("rope.dimension_count", head_dim)) != head_dim:
            raise CheckpointError(f"{self.path}: rotates {rotated} of {head_dim} dimensions a head; all would work")
        embedding = self._tensors.get("model.embed_tokens.weight")
        eos = self._field("tokenizer.ggml.eos_token_id")
        shape = ModelShape(
            architecture="LlamaForCausalLM",
            num_layers=self._number("block_count"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._number("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=self._number("feed_forward_length"),
            vocab_size=self._number("vocab_size", None if embedding is None else int(embedding.shape[1])),
            rms_norm_eps=float(self._field("llama.attention.layer_norm_rms_epsilon") or 1e-5),
            rope=self._rope(),
            max_position_embeddings=self._number("context_length"),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            bos_token_id=self._field("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (eos,),
        )
        check_heads(shape, str(self.path))
        return shape

    @cached_property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} is of type {tensor.tensor_type.name}, which cannot be dequantised; "
                "Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, F16, BF16 and F32 would work"
            ) from error
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        if name.endswith("q_proj.weight"):
            return _halves_from_interleaved(weight, self.shape.num_heads)
        if name.endswith("k_proj.weight"):
            return _halves_from_interleaved(weight, self.shape.num_kv_heads)
        return weight

    @cached_property
    def _tensors(self) -> Mapping[str, gguf.ReaderTensor]:
        return {_hf_name(tensor.name): tensor for tensor in self._reader.tensors}

    def _rope(self) -> RopeShape:
        theta = float(self._field("llama.rope.freq_base") or 10000.0)
        kind = self._field("llama.rope.scaling.type") or "none"
        if kind == "none":
            return RopeShape(theta)
        if kind == "linear":
            return RopeShape(theta, "linear", factor=float(self._field("llama.rope.scaling.factor")))
        raise CheckpointError(f"{self.path}: rope scaling {kind!r} is not supported; none and linear would work")

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._field(f"llama.{key}")
        value = default if value is None else value
        if not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self.path}: llama.{key} is {value!r}; a positive integer is needed")
        return value

    def _field(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()


def _hf_name(name: str) -> str:
    """The Hugging Face name; an unknown one stays as it is and is refused by the check of tensors."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in LAYER_NAMES:
        return name
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def _halves_from_interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """[heads · D, in]: rows 2i, 2i+1 of each head become rows i, i + D/2."""
    rows, inputs = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, inputs).transpose(1, 2).reshape(rows, inputs)
