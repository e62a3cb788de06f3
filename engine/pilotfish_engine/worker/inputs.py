"""What one pass of a decoder reads beside its weights: tensors of fixed shape over a bucket (requests, tokens)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass
class KVCache:
    """k, v: [num_layers, num_slots, num_kv_heads, head_dim]; slot = page * page_size + offset; page 0 is scratch. Only
    model.decoder.resize ever changes which tensors they are, before a request or a recorded step reads them."""

    k: torch.Tensor
    v: torch.Tensor
    page_size: int

    @cached_property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """k and v of each layer."""
        return list(zip(self.k.unbind(), self.v.unbind(), strict=True))

    @property
    def token_bytes(self) -> int:
        """Of one token, in all layers."""
        return sum(x[:, 0].numel() * x.element_size() for x in (self.k, self.v))


@dataclass(frozen=True)
class ForwardInputs:
    """One pass over N tokens of B requests; request b owns tokens q_indptr[b] … q_indptr[b+1]-1.

    token_ids, positions: int64 [N]. slots: int64 [N], where each token's K and V go.
    page_table: int32 [B, max_pages]. prefix_lens: int32 [B], KV rows before this pass's own.
    Token number i of its request sees all prefix rows and, of rows prefix_len + j: those with bit j in tree_mask[token]
    (int64 [N], own bit included), or where tree_mask is None all j ≤ i (causal).
    only: int64 [B], the place in the pass of the one token of each request whose output is read, where of the others
    nothing but K and V is needed (None: every output is read). For causal passes alone.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    prefix_lens: torch.Tensor
    q_indptr: torch.Tensor
    tree_mask: torch.Tensor | None
    only: torch.Tensor | None = None

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [N, …] the rows of the tokens whose output is read."""
        return x if self.only is None else x[self.only]

    def queries(self) -> ForwardInputs:
        """The pass of those tokens alone, when K and V of all are written: the ones before them are prefix."""
        if self.only is None:
            return self
        number = self.only - self.q_indptr[:-1]
        return replace(
            self,
            token_ids=self.token_ids[self.only],
            positions=self.positions[self.only],
            slots=self.slots[self.only],
            prefix_lens=(self.prefix_lens + number).to(torch.int32),
            q_indptr=torch.arange(self.only.shape[0] + 1, dtype=torch.int32, device=self.only.device),
            tree_mask=None if self.tree_mask is None else (self.tree_mask[self.only] >> number) & 1,
            only=None,
        )
