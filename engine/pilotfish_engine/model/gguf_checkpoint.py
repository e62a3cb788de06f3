"""Reads a GGUF file of a family that llama.cpp converts. Each tensor is dequantised to float32 when it is read.

Metadata is put into the words of a config.json, tensors get Hugging Face's names. Two things are not as there: llama's
Q and K are permuted for interleaved rotation, which `read` takes back, and Gemma's norms have their 1 added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.files import as_they_should_be
from pilotfish_engine.gguf_file import GgufTensor, read_head
from pilotfish_engine.model.config_json import whole
from pilotfish_engine.model.families import shape_from_config
from pilotfish_engine.model.shape import ModelShape

FAMILIES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LAYERS_OF_GEMMA3_27B = 62  # whose scores llama.cpp scales by hidden size over heads, those of the others by head_dim
ROPE_FACTORS = "rope_freqs.weight"  # what llama3's scaling divides each frequency by


class GgufCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._head = read_head(path)
        self._stored = self._head.tensors

    @cached_property
    def _architecture(self) -> str:
        architecture = self._head.keys.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise CheckpointError(
                f"{self.path}: architecture {architecture!r} is not supported; one of {known} would work"
            )
        return architecture

    @cached_property
    def shape(self) -> ModelShape:
        with as_they_should_be(self.path):
            config = self._config()
        shape = shape_from_config(config, str(self.path))
        if ROPE_FACTORS in self._stored:
            stored = self._stored[ROPE_FACTORS]
            if stored.num_elements != shape.head_dim // 2:
                raise CheckpointError(
                    f"{self.path}: tensor {ROPE_FACTORS} has {stored.num_elements} numbers, and a head of "
                    f"{shape.head_dim} dimensions turns by {shape.head_dim // 2}; as many would work"
                )
            factors = tuple(float(factor) for factor in self._dequantised(stored).flatten())
            if not all(0 < factor < math.inf for factor in factors):
                raise CheckpointError(f"{self.path}: {ROPE_FACTORS} holds {factors}; positive numbers would work")
            shape = replace(shape, rope=replace(shape.rope, divisors=factors))
        return replace(shape, zero_centred_norms=False)

    def _config(self) -> dict[str, Any]:
        """The metadata as the family's config.json would have it."""
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // heads)
        if (rotated := self._number("rope.dimension_count", head_dim)) != head_dim:
            raise CheckpointError(f"{self.path}: rotates {rotated} of {head_dim} dimensions a head; all would work")
        layers = self._number("block_count")
        embedding = self._stored.get("token_embd.weight")
        ends = [self._head.keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        config = {
            "architectures": [FAMILIES[self._architecture]],
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self._number("feed_forward_length"),
            "vocab_size": self._number("vocab_size", None if embedding is None else embedding.shape[0]),
            "rms_norm_eps": self._field("attention.layer_norm_rms_epsilon") or 1e-5,
            "max_position_embeddings": self._number("context_length"),
            "rope_theta": self._field("rope.freq_base") or 10000.0,
            "rope_scaling": self._scaling(),
            "tie_word_embeddings": "output.weight" not in self._stored,
            "bos_token_id": self._head.keys.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        }
        if self._architecture == "gemma3":
            config |= {
                "sliding_window": self._number("attention.sliding_window"),
                "sliding_window_pattern": self._number("attention.sliding_window_pattern", 6),
                "rope_local_base_freq": self._field("rope.freq_base_swa"),
                "query_pre_attn_scalar": hidden // heads if layers == LAYERS_OF_GEMMA3_27B else head_dim,
            }
        return config

    def _scaling(self) -> dict[str, Any] | None:
        kind = self._field("rope.scaling.type") or "none"
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise CheckpointError(
                f"{self.path}: rope scaling {kind!r} is not supported; none, linear and yarn would work"
            )
        return {
            "rope_type": kind,
            "factor": self._field("rope.scaling.factor"),
            "original_max_position_embeddings": self._field("rope.scaling.original_context_length"),
        }

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Each name in the file → Hugging Face's; an unknown one stays as it is, and is refused by the check of
        tensors."""
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        library = gguf.get_tensor_name_map(kinds[self._architecture], self.shape.num_layers)
        names = {name: name for name in self._stored if name != ROPE_FACTORS}
        for name, _ in self.shape.tensor_shapes():
            stem, end = name.rsplit(".", 1)
            names.pop(stored := f"{library.get_name(stem)}.{end}", None)
            if stored in self._stored:
                names[stored] = name
        return names

    @cached_property
    def _tensors(self) -> Mapping[str, GgufTensor]:
        return {name: self._stored[stored] for stored, name in self._names.items()}

    @cached_property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @cached_property
    def stored_as(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for tensor in self._stored.values():
            counts[tensor.kind.name] += tensor.num_elements
        return counts

    def read(self, name: str) -> Tensor:
        return self._in_halves(name, self._dequantised(self._tensors[name]))

    def stored_type(self, name: str) -> str:
        return self._tensors[name].kind.name

    def read_stored(self, name: str) -> Mapping[str, Tensor]:
        """Each row's bytes."""
        return {"weight": self._in_halves(name, torch.from_numpy(self._head.stored(self._tensors[name]).copy()))}

    def cut(self, name: str) -> None:
        return None

    def _in_halves(self, name: str, weight: Tensor) -> Tensor:
        if self._architecture == "llama" and name.endswith("q_proj.weight"):
            return _halves_from_interleaved(weight, self.shape.num_heads)
        if self._architecture == "llama" and name.endswith("k_proj.weight"):
            return _halves_from_interleaved(weight, self.shape.num_kv_heads)
        return weight

    def _dequantised(self, tensor: GgufTensor) -> Tensor:
        try:
            return torch.from_numpy(self._head.dequantised(tensor))
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} is of type {tensor.kind.name}, which cannot be dequantised; "
                "Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, F16, BF16 and F32 would work"
            ) from error

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._field(key)
        value = default if value is None else value
        return whole(value, f"{self.path}: {self._architecture}.{key}", 1)

    def _field(self, key: str) -> Any:
        """Of the architecture's own metadata."""
        return self._head.keys.get(f"{self._architecture}.{key}")


def _halves_from_interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """[heads · D, in]: rows 2i, 2i+1 of each head become rows i, i + D/2."""
    rows, inputs = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, inputs).transpose(1, 2).reshape(rows, inputs)
