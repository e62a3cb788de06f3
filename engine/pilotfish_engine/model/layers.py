"""The parts of a decoder layer: norm, grouped-query attention over a paged cache, gated MLP.

Each is a few tensors and a call. Knows nothing about files, requests or what follows a layer.
"""

from __future__ import annotations

from torch import Tensor

from pilotfish_engine import kernels
from pilotfish_engine.model.linear import Linear
from pilotfish_engine.worker.inputs import ForwardInputs, KVCache


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """residual += x, in place; (normed residual, residual)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


class Attention:
    """qkv: [(Hq + 2·Hkv)·D, H], rows of Q, K, V in this order; out: [H, Hq·D]; cos_sin: [max_positions, D]."""

    def __init__(self, qkv: Linear, out: Linear, cos_sin: Tensor) -> None:
        self.qkv = qkv
        self.out = out
        self.cos_sin = cos_sin
        self.scale = float(cos_sin.shape[1] ** -0.5)

    def __call__(self, x: Tensor, inputs: ForwardInputs, kv: KVCache, layer: int) -> Tensor:
        k, v = kv.k[layer], kv.v[layer]
        q = kernels.rope_and_write(self.qkv(x), inputs.positions, self.cos_sin, inputs.slots, k, v)
        attended = kernels.paged_attention(q, k, v, kv.page_size, inputs, self.scale)
        return self.out(attended.view(attended.shape[0], -1))


class GatedMLP:
    """gate_up: [2·F, H], gate first; down: [H, F]."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(kernels.silu_and_mul(self.gate_up(x)))


class DecoderLayer:
    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
