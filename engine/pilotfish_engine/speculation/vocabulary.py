"""Which of the target's tokens a draft's logits are of: a draft may know others, fewer, or have rows that are no token.

A checkpoint's vocabulary is often padded, a draft's otherwise than its target's. Such a row is never drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Vocabulary:
    """target_ids: int64 [V], the target's token of each of a draft's columns; num_tokens: how many the target has.

    ids: int64 [W], those that `known` leaves, in its order. size: how many of them the target has.
    """

    def __init__(self, target_ids: Tensor, num_tokens: int) -> None:
        is_token = target_ids < num_tokens
        self.size = int(is_token.sum())
        first = bool(is_token[: self.size].all())  # nothing but the last columns is in excess
        self.ids = target_ids[: self.size] if first else torch.where(is_token, target_ids, 0)
        self._excess = None if first else ~is_token

    def known(self, logits: Tensor) -> Tensor:
        """float32 [N, V] → [N, W]: without what the target does not have."""
        if self._excess is None:
            return logits[:, : self.size]
        return logits.masked_fill(self._excess, -torch.inf)
