"""What plain steps leave for a draft to read later: how many tokens of each row, and the target's features of each.

They are read together (draft-extend) every CATCH_UP plain steps, or before a row is drafted for again. The host counts
them, between steps; a step itself copies nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState

CATCH_UP = 32  # fewer, and the passes that read them are felt (docs/decisions.md)


class Unread:
    """feature_size: width of what is kept of a token; 0 for a draft that reads tokens alone."""

    def __init__(self, state: RequestState, feature_size: int, dtype: torch.dtype) -> None:
        self._state = state
        self._lag = state.kept.new_numbers("unread")
        self._features = state.kept.new("unread features", (CATCH_UP, feature_size), dtype)  # at position mod CATCH_UP

    def admit(self, row: int) -> None:
        self._lag[row] = 0

    def lag(self, row: int) -> int:
        return self._lag[row]

    def due(self, rows: Rows, num_steps: int) -> list[int] | None:
        """As Proposer.due: something is where the step drafts, or a row has no place for one more token."""
        lags = [self._lag[row] for row in rows.host]
        longest = max(lags)
        is_due = longest == CATCH_UP or (longest > 0 and num_steps > 0)
        if is_due or num_steps == 0:
            for row, lag in zip(rows.host, lags, strict=True):
                self._lag[row] = (0 if is_due else lag) + (num_steps == 0)
        return lags if is_due else None

    def features(self, rows: Rows, counts: Tensor, width: int) -> Tensor:
        """[B, width, feature_size]: of the last counts[i] ≤ width tokens of each row (int64 [B]), in order, the rest is
        padding."""
        at = (self._state.seq_lens[rows.index] - counts).unsqueeze(1) + torch.arange(width, device=rows.device)
        return self._features[rows.index.unsqueeze(1), at % CATCH_UP]

    def keep(self, rows: Rows, features: Tensor) -> None:
        """After a plain step was committed; features: [B, feature_size]."""
        self._features[rows.index, (self._state.seq_lens[rows.index] - 1) % CATCH_UP] = features
