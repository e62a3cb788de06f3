"""From a model file to a Decoder, or only to its shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pilotfish_engine.model.checkpoint import check_tensors, open_checkpoint
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.layers import Attention, DecoderLayer, GatedMLP, RMSNorm
from pilotfish_engine.model.linear import Linear
from pilotfish_engine.model.memory import Arena
from pilotfish_engine.model.rope import cos_sin_table
from pilotfish_engine.model.shape import ModelShape


def read_shape(source: Path) -> ModelShape:
    """What `load` would build, from the metadata alone. Raises CheckpointError."""
    return open_checkpoint(source).shape


def load(
    source: Path, dtype: torch.dtype, device: torch.device | str = "cpu", max_positions: int | None = None
) -> Decoder:
    """Reads every weight as `dtype` on `device`; rotary tables reach `max_positions`, or the checkpoint's own limit.

    Raises CheckpointError, before any weight is read, where the files are not exactly the model that they claim to be.
    """
    checkpoint = open_checkpoint(source)
    check_tensors(checkpoint)
    shape = checkpoint.shape
    weights = Weights(checkpoint, dict(shape.tensor_shapes()), dtype, torch.device(device))
    cos_sin = cos_sin_table(shape.rope, shape.head_dim, max_positions or shape.max_position_embeddings).to(device)
    layers = [_layer(weights, shape, f"model.layers.{index}.", cos_sin) for index in range(shape.num_layers)]
    norm = RMSNorm(weights.read("model.norm.weight"), shape.rms_norm_eps)
    embed = weights.read("model.embed_tokens.weight")
    head = embed if shape.tie_word_embeddings else weights.read("lm_head.weight")
    return Decoder(shape, embed, layers, norm, Linear(head))


class Files(Protocol):
    def read(self, name: str) -> Tensor:
        """The tensor in a floating dtype."""
        ...


class Weights:
    """Reads tensors of these shapes into one arena, which is in the order of use when they are read in it."""

    def __init__(
        self, files: Files, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.files = files
        self.shapes = shapes
        self.arena = Arena([math.prod(shape) for shape in shapes.values()], dtype, device)

    def read(self, *names: str) -> Tensor:
        """The tensors of these names, stacked along their first axis."""
        rows = [self.shapes[name][0] for name in names]
        stacked = self.arena.take([sum(rows), *self.shapes[names[0]][1:]])
        end = 0
        for name, count in zip(names, rows, strict=True):
            stacked[end : (end := end + count)].copy_(self.files.read(name))
        return stacked


def _layer(weights: Weights, shape: ModelShape, prefix: str, cos_sin: Tensor) -> DecoderLayer:
    attention_norm = RMSNorm(weights.read(prefix + "input_layernorm.weight"), shape.rms_norm_eps)
    qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
    qkv_bias = weights.read(*(f"{name}.bias" for name in qkv)) if shape.qkv_bias else None
    return DecoderLayer(
        attention_norm=attention_norm,
        attention=Attention(
            qkv=Linear(weights.read(*(f"{name}.weight" for name in qkv)), qkv_bias),
            out=Linear(weights.read(prefix + "self_attn.o_proj.weight")),
            cos_sin=cos_sin,
        ),
        mlp_norm=RMSNorm(weights.read(prefix + "post_attention_layernorm.weight"), shape.rms_norm_eps),
        mlp=GatedMLP(
            gate_up=Linear(weights.read(prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight")),
            down=Linear(weights.read(prefix + "mlp.down_proj.weight")),
        ),
    )
