"""Builds the parts of a decoder from weights, as a shape says. A draft that holds a layer of a family uses the same.

The tensors that `build_layer` reads are those of `shape.layer_tensors(prefix, index)`. Knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pilotfish_engine import kernels
from pilotfish_engine.model import rope
from pilotfish_engine.model.attention import GroupedQueryAttention
from pilotfish_engine.model.layers import MLP, Attention, DecoderLayer, GatedMLP, RMSNorm
from pilotfish_engine.model.linear import Linear, Rows, read_experts, read_linear
from pilotfish_engine.model.mla import LatentAttention, LowRank
from pilotfish_engine.model.moe import MixtureOfExperts, Router
from pilotfish_engine.model.shape import LatentShape, ModelShape, MoEShape, RopeShape, WindowShape
from pilotfish_engine.model.weights import Weights

LATENT_NORM_EPS = 1e-6  # whatever rms_norm_eps says
ACTIVATIONS = {"silu": kernels.silu_and_mul, "gelu_tanh": kernels.gelu_and_mul}


def build_layer(weights: Weights, shape: ModelShape, prefix: str, index: int, cos_sin: Tensor) -> DecoderLayer:
    """One decoder layer from the tensors whose names begin with `prefix`, like "model.layers.3."; `index` decides
    between a plain MLP and experts, and whether attention has a window. cos_sin: what `rotary_table` gave."""

    def norm(name: str) -> RMSNorm:
        return build_norm(weights, shape, f"{prefix}{name}_layernorm.weight")

    return DecoderLayer(
        attention_norm=norm("input"),
        attention=build_attention(weights, shape, f"{prefix}self_attn.", cos_sin, shape.window_of(index)),
        mlp_norm=norm("pre_feedforward" if shape.output_norms else "post_attention"),
        mlp=build_mlp(weights, shape, f"{prefix}mlp.", index),
        output_norms=(norm("post_attention"), norm("post_feedforward")) if shape.output_norms else None,
    )


def rotary_table(
    shape: ModelShape, max_positions: int, device: torch.device | str, layer_rope: RopeShape | None = None
) -> Tensor:
    """float32 [max_positions, shape.rope_width], for the attention of every layer that has this rope, or the shape's
    own."""
    return rope.cos_sin_table(layer_rope or shape.rope, shape.rope_width, max_positions).to(device)


def build_norm(weights: Weights, shape: ModelShape, name: str, order: Tensor | None = None) -> RMSNorm:
    """order: of the dimensions, as int64 indices of the checkpoint's."""
    weight = weights.files.read(name)
    if order is not None:
        weight = weight[order]
    if shape.zero_centred_norms:
        weight = 1.0 + weight.float()
    return RMSNorm(weights.place(weights.shapes[name], [weight]), shape.rms_norm_eps)


def build_attention(
    weights: Weights, shape: ModelShape, prefix: str, cos_sin: Tensor, window: WindowShape | None = None
) -> Attention:
    """The kind that the shape asks for; `prefix` is like "model.layers.3.self_attn."."""
    if shape.latent is not None:
        return _latent_attention(weights, shape.latent, shape.num_heads, prefix, cos_sin)
    order = None if shape.rope.rotated is None else rope.order(shape.head_dim, shape.rope.rotated)
    qkv, gate = _qkv_and_gate(weights, shape, prefix, order)
    qk_norm = None
    if shape.qk_norm:
        q_norm, k_norm = (build_norm(weights, shape, f"{prefix}{name}_norm.weight", order) for name in "qk")
        qk_norm = (q_norm, k_norm)
    return GroupedQueryAttention(
        qkv=qkv,
        out=read_linear(weights, Rows(f"{prefix}o_proj"), bias=shape.out_bias),
        cos_sin=cos_sin,
        scale=shape.head_dim**-0.5 if shape.query_scale is None else shape.query_scale,
        qk_norm=qk_norm,
        gate=gate,
        # one that no sequence outgrows hides nothing
        window=None if window is None or window.size >= cos_sin.shape[0] else window.size,
    )


def build_mlp(weights: Weights, shape: ModelShape, prefix: str, index: int) -> MLP:
    if shape.moe is None or not shape.moe.in_layer(index):
        return _gated_mlp(weights, prefix, ACTIVATIONS[shape.activation])
    return _mixture(weights, shape.moe, prefix)


def _latent_attention(
    weights: Weights, latent: LatentShape, heads: int, prefix: str, cos_sin: Tensor
) -> LatentAttention:
    turning = rope.order(latent.rope_dim, latent.rope_dim, latent.interleaved)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.read(f"{prefix}{name}.weight"), LATENT_NORM_EPS)

    def rotated(name: str, still: int, bias: bool) -> Linear:
        """Rows of heads of which `still` dimensions come before those that turn."""
        order = torch.cat((torch.arange(still), still + turning))
        rows = weights.shapes[f"{prefix}{name}.weight"][0] // len(order)
        return read_linear(weights, Rows(f"{prefix}{name}", _of_each_head(rows, len(order), order)), bias=bias)

    query: Callable[[Tensor], Tensor]
    if latent.q_rank is None:
        query = rotated("q_proj", latent.nope_dim, bias=False)
    else:
        query = LowRank(
            down=read_linear(weights, Rows(f"{prefix}q_a_proj"), bias=latent.bias),
            norm=norm("q_a_layernorm"),
            up=rotated("q_b_proj", latent.nope_dim, bias=False),
        )
    down = rotated("kv_a_proj_with_mqa", latent.kv_rank, bias=latent.bias)
    down_norm = norm("kv_a_layernorm")
    key_and_value = read_linear(weights, Rows(f"{prefix}kv_b_proj")).dense().view(heads, -1, latent.kv_rank)
    return LatentAttention(
        query=query,
        latent=down,
        latent_norm=down_norm,
        key=key_and_value[:, : latent.nope_dim],
        value=key_and_value[:, latent.nope_dim :],
        out=read_linear(weights, Rows(f"{prefix}o_proj"), bias=latent.bias),
        cos_sin=cos_sin,
        scale=latent.temperature * (latent.nope_dim + latent.rope_dim) ** -0.5,
    )


def _mixture(weights: Weights, moe: MoEShape, prefix: str) -> MixtureOfExperts:
    correction = f"{prefix}gate.e_score_correction_bias"
    router = Router(
        weights.read_float32(f"{prefix}gate.weight"),
        weights.read_float32(correction) if moe.routing.correction else None,
        moe.routing,
    )
    experts = [f"{prefix}experts.{number}." for number in range(moe.routing.num_experts)]
    gate_up = read_experts(weights, [[Rows(f"{expert}gate_proj"), Rows(f"{expert}up_proj")] for expert in experts])
    down = read_experts(weights, [[Rows(f"{expert}down_proj")] for expert in experts])
    shared = gate = None
    if moe.shared is not None:
        name, _ = moe.shared
        shared = _gated_mlp(weights, f"{prefix}{name}.")
        gate = read_linear(weights, Rows(f"{prefix}{name}_gate")) if moe.shared_gate else None
    return MixtureOfExperts(router, gate_up, down, shared, gate)


def _gated_mlp(
    weights: Weights, prefix: str, activation: Callable[[Tensor], Tensor] = kernels.silu_and_mul
) -> GatedMLP:
    return GatedMLP(
        gate_up=read_linear(weights, Rows(f"{prefix}gate_proj"), Rows(f"{prefix}up_proj")),
        down=read_linear(weights, Rows(f"{prefix}down_proj")),
        activation=activation,
    )


def _qkv_and_gate(
    weights: Weights, shape: ModelShape, prefix: str, order: Tensor | None
) -> tuple[Linear, Linear | None]:
    """Rows of Q, K and V one below the other, each head's in the order of rotation, and those of an output gate. With a
    gate q_proj holds, for every head, rows of its query and as many of its gate."""
    heads, dim = shape.num_heads, shape.head_dim
    plain, gate = torch.arange(dim), None
    q = None if order is None else _of_each_head(heads, dim, order)
    k = None if order is None else _of_each_head(shape.num_kv_heads, dim, order)
    if shape.output_gate:
        q = _of_each_head(heads, 2 * dim, plain if order is None else order)
        gate_rows = Rows(f"{prefix}q_proj", _of_each_head(heads, 2 * dim, dim + plain))
        gate = read_linear(weights, gate_rows, bias=shape.qkv_bias)
    parts = Rows(f"{prefix}q_proj", q), Rows(f"{prefix}k_proj", k), Rows(f"{prefix}v_proj")
    return read_linear(weights, *parts, bias=shape.qkv_bias), gate


def _of_each_head(heads: int, stride: int, order: Tensor) -> Tensor:
    """int64: these rows of every head, of which each has `stride`."""
    return (stride * torch.arange(heads).unsqueeze(1) + order).flatten()
