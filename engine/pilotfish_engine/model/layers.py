"""The parts that decoders of every family share: embedding, norm, gated MLP, and the layer around attention and MLP.

Each is a few tensors and a call. Knows nothing about files, requests or what follows a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish_engine import kernels
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.linear import Linear


class Embedding:
    """weight: [V, H]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [N] → [N, H]."""
        return functional.embedding(token_ids, self.weight)


class ShortEmbedding(Embedding):
    """Of a draft that knows fewer tokens than its target: what it does not know it reads as token 0."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        return super().__call__(torch.where(token_ids < self.weight.shape[0], token_ids, 0))


def reading(embed: Embedding, num_tokens: int) -> Embedding:
    """`embed`, made safe for tokens up to num_tokens."""
    return embed if embed.weight.shape[0] >= num_tokens else ShortEmbedding(embed.weight)


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """residual += x, in place; (normed residual, residual)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


class Attention(Protocol):
    """cos_sin: float32 [max_positions, D], the rotary table."""

    cos_sin: Tensor

    def __call__(self, x: Tensor, inputs: ForwardInputs, kv: KVCache, layer: int) -> Tensor:
        """x [N, H] → inputs.kept of [N, H]; writes all tokens' rows of layer `layer` of the cache before it reads
        them."""
        ...


class MLP(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [N, H] → [N, H], each token for itself."""
        ...


class GatedMLP:
    """gate_up: [2·F, H], gate first; down: [H, F]; activation: [N, 2·F] → [N, F]."""

    def __init__(
        self, gate_up: Linear, down: Linear, activation: Callable[[Tensor], Tensor] = kernels.silu_and_mul
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))


class DecoderLayer:
    """output_norms: of what attention and of what the MLP give, before it is added (None: it is added as it is)."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: MLP,
        output_norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.output_norms = output_norms

    def __call__(
        self, x: Tensor | None, residual: Tensor, inputs: ForwardInputs, kv: KVCache, layer: int
    ) -> tuple[Tensor, Tensor]:
        """x [N, H]: what the layer before adds to `residual` [N, H] (None: nothing is before). Returns the same of this
        layer, of the tokens that inputs.kept says: the residual stream behind it is their sum. `residual` is written in
        place."""
        if x is None:
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(x, residual)
        attended, residual = self.attention(normed, inputs, kv, layer), inputs.kept(residual)
        if self.output_norms is None:
            normed, residual = self.mlp_norm.add(attended, residual)
            return self.mlp(normed), residual
        after_attention, after_mlp = self.output_norms
        normed, residual = self.mlp_norm.add(after_attention(attended), residual)
        return after_mlp(self.mlp(normed)), residual
