"""A decoder: token ids in, hidden states and logits out, K and V written to and read from a paged cache.

One class for every family whose layers have the same order; families differ in the parts they are assembled from.
Knows nothing about sampling, speculation, requests or files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.layers import DecoderLayer, Embedding, RMSNorm
from pilotfish_engine.model.linear import Linear
from pilotfish_engine.model.memory import zeros
from pilotfish_engine.model.shape import ModelShape


class Decoder:
    """lm_head: a Linear of [rows, H], the embedding's own tensor where tied. num_tokens: how many of the rows are
    tokens, from the first; the others, which only pad the checkpoint, have no logits."""

    def __init__(
        self, shape: ModelShape, embed: Embedding, layers: Sequence[DecoderLayer], norm: RMSNorm, lm_head: Linear
    ) -> None:
        self.shape = shape
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.num_tokens = shape.vocab_size
        self._embed_scale = float(torch.tensor(shape.embed_scale, dtype=embed.dtype))

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def new_kv_cache(self, num_pages: int, page_size: int) -> KVCache:
        return new_kv_cache(self.shape, self.shape.num_layers, num_pages, page_size, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, inputs: ForwardInputs, kv: KVCache, aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns hidden states [N, H] after the final norm, and the residual streams that are asked for. These are,
        for each of `aux_layers`, in its order, [N, H] at that layer's input (num_layers: after the last layer,
        before the norm)."""
        residual = self.embed(inputs.token_ids)
        if self._embed_scale != 1:
            residual = residual * self._embed_scale
        taps: dict[int, Tensor] = {}
        x: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                taps[index] = residual.clone() if x is None else residual + x
            x, residual = layer(x, residual, inputs, kv, index)
        assert x is not None, "a model has at least one layer"
        hidden, residual = self.norm.add(x, residual)
        taps[len(self.layers)] = residual
        return hidden, [taps[index] for index in aux_layers]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, H] after the final norm → float32 [M, num_tokens]. Not contiguous where there is padding."""
        return self.lm_head(hidden, torch.float32)[:, : self.num_tokens]


def new_kv_cache(
    shape: ModelShape, num_layers: int, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Zeros for pages 1 … num_pages and the scratch page 0, as attention of this shape keeps them. A latent is key
    and value in one, so there `v` has no dimensions."""
    size = (num_layers, (num_pages + 1) * page_size, shape.num_kv_heads, shape.head_dim)
    k = zeros(size, dtype, device)
    return KVCache(k, k[..., :0] if shape.latent is not None else zeros(size, dtype, device), page_size)


def resize(kv: KVCache, num_pages: int) -> None:
    """Gives a cache pages 1 … num_pages and the scratch page, all zero; what it held is gone."""
    layers, _, heads, dim = kv.k.shape
    size, dtype, device = (layers, (num_pages + 1) * kv.page_size, heads, dim), kv.k.dtype, kv.k.device
    is_latent = kv.v.shape[3] == 0
    kv.k = kv.v = kv.k.new_empty(0)  # the old ones go before the new ones come
    kv.__dict__.pop("layers", None)
    kv.k = zeros(size, dtype, device)
    kv.v = kv.k[..., :0] if is_latent else zeros(size, dtype, device)
