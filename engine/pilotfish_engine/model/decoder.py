"""A decoder: token ids in, hidden states and logits out, K and V written to and read from a paged cache.

One class for every family whose layers have the same order; families differ in the parts they are assembled from.
Knows nothing about sampling, speculation, requests or files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish_engine.model.layers import DecoderLayer, RMSNorm
from pilotfish_engine.model.linear import Linear
from pilotfish_engine.model.memory import zeros
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.worker.inputs import ForwardInputs, KVCache


class Decoder:
    """embed: [V, H]; lm_head: a Linear of [V, H], the same tensor where tied."""

    def __init__(
        self, shape: ModelShape, embed: Tensor, layers: Sequence[DecoderLayer], norm: RMSNorm, lm_head: Linear
    ) -> None:
        self.shape = shape
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def new_kv_cache(self, num_pages: int, page_size: int) -> KVCache:
        """Zeros for pages 1 … num_pages and the scratch page 0, in the model's dtype."""
        slots = (num_pages + 1) * page_size
        size = (self.shape.num_layers, slots, self.shape.num_kv_heads, self.shape.head_dim)
        k, v = (zeros(size, self.dtype, self.device) for _ in range(2))
        return KVCache(k, v, page_size)

    @torch.inference_mode()
    def forward(
        self, inputs: ForwardInputs, kv: KVCache, aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [N, H] after the final norm, and for each of `aux_layers`, in its order, the residual stream
        [N, H] at that layer's input (num_layers: after the last layer, before the norm)."""
        residual = functional.embedding(inputs.token_ids, self.embed)
        taps: dict[int, Tensor] = {}
        x: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if x is None:
                normed = layer.attention_norm(residual)
            else:
                normed, residual = layer.attention_norm.add(x, residual)
            if index in aux_layers:
                taps[index] = residual.clone()
            attended = layer.attention(normed, inputs, kv, index)
            normed, residual = layer.mlp_norm.add(attended, residual)
            x = layer.mlp(normed)
        assert x is not None, "a model has at least one layer"
        hidden, residual = self.norm.add(x, residual)
        taps[len(self.layers)] = residual
        return hidden, [taps[index] for index in aux_layers]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, H] after the final norm → float32 [M, V]."""
        return self.lm_head(hidden, torch.float32)
