"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a cache of latents, in the absorbed form.

A token's cache row is its latent after the norm, then its rotated key: one head that every query head reads, and key
and value in one. Queries are brought into the latent's space before attention, what was attended out of it behind. That
reads the least memory when a few tokens see a long context; a long prompt takes more products than with keys and values
spelled out: (2·kv_rank + rope_dim) for each pair of tokens and head, not (nope_dim + rope_dim + v_dim).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish_engine import kernels
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.layers import RMSNorm
from pilotfish_engine.model.linear import Linear
from pilotfish_engine.model.rope import rotate


class LowRank:
    """x [N, in] → up(norm(down(x)))."""

    def __init__(self, down: Linear, norm: RMSNorm, up: Linear) -> None:
        self.down = down
        self.norm = norm
        self.up = up

    def __call__(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.down(x)))


@dataclass(eq=False)
class LatentAttention:
    """query: [N, H] → [N, Hq·(nope_dim + rope_dim)]; latent: [kv_rank + rope_dim, H]; key: [Hq, nope_dim, kv_rank] and
    value: [Hq, v_dim, kv_rank], how heads read a latent; out: [H, Hq·v_dim]; cos_sin: [max_positions, rope_dim]."""

    query: Callable[[Tensor], Tensor]
    latent: Linear
    latent_norm: RMSNorm
    key: Tensor
    value: Tensor
    out: Linear
    cos_sin: Tensor
    scale: float

    def __call__(self, x: Tensor, inputs: ForwardInputs, kv: KVCache, layer: int) -> Tensor:
        rows = kv.k[layer]
        heads, nope_dim, kv_rank = self.key.shape
        rope_dim = self.cos_sin.shape[1]
        row, read = self.latent(x), inputs.kept(x)
        latent = self.latent_norm(row[:, :kv_rank].contiguous()).unsqueeze(1)
        key = rotate(row[:, None, kv_rank:], inputs.positions, self.cos_sin)
        rows.index_copy_(0, inputs.slots, torch.cat((latent, key), dim=2))
        inputs = inputs.queries()
        query = self.query(read).view(-1, heads, nope_dim + rope_dim)
        absorbed = torch.bmm(query[:, :, :nope_dim].transpose(0, 1), self.key).transpose(0, 1)
        q = torch.cat((absorbed, rotate(query[:, :, nope_dim:], inputs.positions, self.cos_sin)), dim=2)
        attended = kernels.paged_attention(q, rows, rows, kv.page_size, inputs.attention, self.scale)[:, :, :kv_rank]
        values = torch.bmm(attended.transpose(0, 1), self.value.transpose(1, 2)).transpose(0, 1)
        return self.out(values.flatten(1))
