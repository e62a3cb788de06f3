"""Holds what attention reads beside queries and caches. What is made of that once for all layers stands here too."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class AttentionInputs:
    """A pass over N tokens of B requests; request b owns tokens q_indptr[b] … q_indptr[b+1]-1.

    page_table: int32 [B, max_pages]. prefix_lens: int32 [B], KV rows before this pass's own. q_indptr: int32 [B + 1].
    Token number i of its request sees all prefix rows and, of rows prefix_len + j: those with bit j in tree_mask[token]
    (int64 [N], own bit included), or where tree_mask is None all j ≤ i (causal).
    """

    page_table: torch.Tensor
    prefix_lens: torch.Tensor
    q_indptr: torch.Tensor
    tree_mask: torch.Tensor | None = None
    _plans: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def plan(self, kind: Hashable, make: Callable[[], Plan]) -> Plan:
        """Returns what `make` gives, made once for each kind. kind: whose plan it is, and all that it depends on beside
        these inputs' shapes; not on their numbers, as a recorded step reads others from the same tensors."""
        if kind not in self._plans:
            self._plans[kind] = make()
        found: Plan = self._plans[kind]
        return found
