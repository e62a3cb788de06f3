"""Grouped-query attention over a paged cache, with the additions that some families make to it.

Knows nothing about files, or how a checkpoint orders what is held here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pilotfish_engine import kernels
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.layers import RMSNorm
from pilotfish_engine.model.linear import Linear


class GroupedQueryAttention:
    """qkv: [(Hq + 2·Hkv)·D, H], rows of Q, K, V in this order; out: [H, Hq·D]; cos_sin: [max_positions, D].

    qk_norm: norms over D of each head's query and of its key, before rotation. gate: [Hq·D, H], whose sigmoid weighs
    what was attended. window: how many of the last positions a token sees, its own among them (None: all).
    """

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        cos_sin: Tensor,
        scale: float,
        qk_norm: tuple[RMSNorm, RMSNorm] | None = None,
        gate: Linear | None = None,
        window: int | None = None,
    ) -> None:
        self.qkv = qkv
        self.out = out
        self.cos_sin = cos_sin
        self.qk_norm = qk_norm
        self.gate = gate
        self.scale = scale
        self.window = window

    def __call__(self, x: Tensor, inputs: ForwardInputs, kv: KVCache, layer: int) -> Tensor:
        k, v = kv.layers[layer]
        qkv = self.qkv(x)
        if self.qk_norm is not None:
            self._norm_heads(qkv, num_kv_heads=k.shape[1])
        q = kernels.rope_and_write(qkv, inputs.positions, self.cos_sin, inputs.slots, k, v)
        attended = self.attend(inputs.kept(q), k, v, kv.page_size, inputs.queries().attention).flatten(1)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(inputs.kept(x)))
        return self.out(attended)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, page_size: int, inputs: AttentionInputs) -> Tensor:
        """q [N, Hq, D] over one layer's caches, which hold the pass's own rows already → [N, Hq, D]."""
        return kernels.paged_attention(q, k, v, page_size, inputs, self.scale, self.window)

    def _norm_heads(self, qkv: Tensor, num_kv_heads: int) -> None:
        """Queries and keys, in place."""
        assert self.qk_norm is not None
        heads = qkv.view(qkv.shape[0], -1, self.cos_sin.shape[1])
        keys = heads.shape[1] - 2 * num_kv_heads
        for norm, part in zip(self.qk_norm, (heads[:, :keys], heads[:, keys:-num_kv_heads]), strict=True):
            part.copy_(norm(part.flatten(0, 1).contiguous()).view_as(part))
