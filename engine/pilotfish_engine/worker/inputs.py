"""What one pass of a decoder reads beside its weights: tensors of fixed shape over a bucket (requests, tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVCache:
    """k, v: [num_layers, num_slots, num_kv_heads, head_dim]; slot = page * page_size + offset; page 0 is scratch."""

    k: torch.Tensor
    v: torch.Tensor
    page_size: int


@dataclass(frozen=True)
class ForwardInputs:
    """One pass over N tokens of B requests; request b owns tokens q_indptr[b] … q_indptr[b+1]-1.

    token_ids, positions: int64 [N]. slots: int64 [N], where each token's K and V go.
    page_table: int32 [B, max_pages]. prefix_lens: int32 [B], KV rows before this pass's own.
    Token number i of its request sees all prefix rows and, of rows prefix_len + j: those with bit j in tree_mask[token]
    (int64 [N], own bit included), or where tree_mask is None all j ≤ i (causal).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    prefix_lens: torch.Tensor
    q_indptr: torch.Tensor
    tree_mask: torch.Tensor | None
