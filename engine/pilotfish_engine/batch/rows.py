"""Names the rows that a step is about: on the device, on the host, and what they ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pilotfish_engine.types import Traits


@dataclass(frozen=True)
class Rows:
    """index: int64 [B], on the device, or [N] of N tokens of these rows; host: the rows' numbers, for what needs no
    copy; traits: what some of them ask for. A row of padding may occur several times."""

    index: Tensor
    host: tuple[int, ...]
    traits: Traits

    def __len__(self) -> int:
        return len(self.host)

    @property
    def device(self) -> torch.device:
        return self.index.device

    def of(self, place: Tensor) -> Rows:
        """The row of each of N tokens, by its request's place in the batch, int64 [N]."""
        return replace(self, index=self.index[place])

    def repeated(self, times: int) -> Rows:
        """Each row for so many tokens, one behind the other."""
        return replace(self, index=self.index.repeat_interleave(times, output_size=len(self.host) * times))
