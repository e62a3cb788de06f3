"""Builds the parts of a decoder from weights, as a shape says. A draft that holds a layer of a family uses the same.

The tensors that `build_layer` reads are those of `shape.layer_tensors(prefix, index)`. Knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pilotfish_engine.model import rope
from pilotfish_engine.model.attention import GroupedQueryAttention
from pilotfish_engine.model.layers import MLP, Attention, DecoderLayer, GatedMLP, RMSNorm
from pilotfish_engine.model.linear import Linear
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.model.weights import Weights


def build_layer(weights: Weights, shape: ModelShape, prefix: str, index: int, cos_sin: Tensor) -> DecoderLayer:
    """One decoder layer from the tensors whose names begin with `prefix`, like "model.layers.3."; `index` decides
    between a plain MLP and experts. cos_sin: what `rotary_table` gave."""
    return DecoderLayer(
        attention_norm=build_norm(weights, shape, f"{prefix}input_layernorm.weight"),
        attention=build_attention(weights, shape, f"{prefix}self_attn.", cos_sin),
        mlp_norm=build_norm(weights, shape, f"{prefix}post_attention_layernorm.weight"),
        mlp=build_mlp(weights, shape, f"{prefix}mlp.", index),
    )


def rotary_table(shape: ModelShape, max_positions: int, device: torch.device | str) -> Tensor:
    """float32 [max_positions, shape.rope_width], for the attention of every layer."""
    return rope.cos_sin_table(shape.rope, shape.rope_width, max_positions).to(device)


def build_norm(weights: Weights, shape: ModelShape, name: str, order: Tensor | None = None) -> RMSNorm:
    """order: of the dimensions, as int64 indices of the checkpoint's."""
    weight = weights.files.read(name)
    if order is not None:
        weight = weight[order]
    if shape.zero_centred_norms:
        weight = 1.0 + weight.float()
    return RMSNorm(weights.place(weights.shapes[name], [weight]), shape.rms_norm_eps)


def build_attention(weights: Weights, shape: ModelShape, prefix: str, cos_sin: Tensor) -> Attention:
    """The kind that the shape asks for; `prefix` is like "model.layers.3.self_attn."."""
    order = None
    if shape.rope.rotated is not None:
        order = rope.order(shape.head_dim, shape.rope.rotated)
    qkv, gate = _qkv(weights, shape, prefix, "weight", order)
    qkv_bias, gate_bias = _qkv(weights, shape, prefix, "bias", order) if shape.qkv_bias else (None, None)
    qk_norm = None
    if shape.qk_norm:
        q_norm, k_norm = (build_norm(weights, shape, f"{prefix}{name}_norm.weight", order) for name in "qk")
        qk_norm = (q_norm, k_norm)
    return GroupedQueryAttention(
        qkv=Linear(qkv, qkv_bias),
        out=_linear(weights, f"{prefix}o_proj", bias=shape.out_bias),
        cos_sin=cos_sin,
        qk_norm=qk_norm,
        gate=None if gate is None else Linear(gate, gate_bias),
    )


def build_mlp(weights: Weights, shape: ModelShape, prefix: str, index: int) -> MLP:
    return _gated_mlp(weights, prefix)


def _gated_mlp(weights: Weights, prefix: str) -> GatedMLP:
    return GatedMLP(
        gate_up=Linear(weights.read(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")),
        down=Linear(weights.read(f"{prefix}down_proj.weight")),
    )


def _linear(weights: Weights, name: str, bias: bool) -> Linear:
    return Linear(weights.read(f"{name}.weight"), weights.read(f"{name}.bias") if bias else None)


def _qkv(
    weights: Weights, shape: ModelShape, prefix: str, kind: str, order: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Rows of Q, K and V one below the other, each head's in the order of rotation, and those of an output gate. With a
    gate q_proj holds, for every head, rows of its query and as many of its gate."""
    q, k, v = (weights.files.read(f"{prefix}{name}_proj.{kind}") for name in "qkv")
    gate = None
    if shape.output_gate:
        q, gate = (part.flatten(0, 1) for part in q.view(shape.num_heads, 2, shape.head_dim, *q.shape[1:]).unbind(1))
        gate = weights.place(gate.shape, [gate])

    def parts() -> Iterator[Tensor]:
        yield _ordered(q, order)
        yield _ordered(k, order)
        yield v

    return weights.place([q.shape[0] + k.shape[0] + v.shape[0], *q.shape[1:]], parts()), gate


def _ordered(rows: Tensor, order: Tensor | None) -> Tensor:
    """rows [heads · D, …] with the D of each head in this order."""
    return rows if order is None else rows.view(-1, len(order), *rows.shape[1:])[:, order].flatten(0, 1)
