"""Holds what one pass of a decoder reads beside its weights: tensors of fixed shape over a bucket of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from pilotfish_engine.kernels.inputs import AttentionInputs


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
    """One pass over N tokens of B requests.

    token_ids, positions: int64 [N]. slots: int64 [N], where each token's K and V go.
    only: int64 [B], the place in the pass of the one token of each request whose output is read, where of the others
    nothing but K and V is needed (None: every output is read). For causal passes alone.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    attention: AttentionInputs
    only: torch.Tensor | None = None

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [N, …] the rows of the tokens whose output is read."""
        return x if self.only is None else x[self.only]

    def queries(self) -> ForwardInputs:
        """The pass of those tokens alone, when K and V of all are written: the ones before them are prefix."""
        if self.only is None:
            return self
        whole = self.attention
        number = self.only - whole.q_indptr[:-1]
        return ForwardInputs(
            token_ids=self.token_ids[self.only],
            positions=self.positions[self.only],
            slots=self.slots[self.only],
            attention=AttentionInputs(
                page_table=whole.page_table,
                prefix_lens=(whole.prefix_lens + number).to(torch.int32),
                q_indptr=torch.arange(self.only.shape[0] + 1, dtype=torch.int32, device=self.only.device),
                tree_mask=None if whole.tree_mask is None else (whole.tree_mask[self.only] >> number) & 1,
            ),
        )
