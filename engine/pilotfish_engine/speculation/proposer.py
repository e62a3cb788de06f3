"""What a method implements: one file with a class of this protocol, and one line in `registry`.

Knows nothing about how its candidates are verified. A proposer may keep tensors by row (of the largest batch) and its
own KV pool, whose pages have the numbers of the target's: a row's pages serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.speculation.tree import Candidates
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.types import Chunk
from pilotfish_engine.worker.state import RequestState


@dataclass(frozen=True)
class TargetHidden:
    """What the target pass leaves for drafts that read it. hidden: [N, H]; aux: one [N, H] for each wanted layer."""

    hidden: torch.Tensor
    aux: tuple[torch.Tensor, ...]


class Proposer(Protocol):
    """Drafts for a batch. `rows` int64 [B] is on the device, `host_rows` the same on the host."""

    aux_layers: tuple[int, ...]  # target layers whose inputs the method reads; empty for none

    def slots_needed(self, settings: Settings) -> int:
        """KV positions that a step may write past a row's last known token."""
        ...

    def admit(self, row: int, cached_len: int) -> None:
        """A row begins; its first `cached_len` KV rows are right in the method's own pool too."""
        ...

    def extend(self, chunks: Sequence[Chunk], target: TargetHidden) -> None:
        """Prompt chunks went through the target. The token after each chunk is known by now."""
        ...

    def propose(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> Candidates: ...

    def accepted(
        self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings, verdict: Verdict, target: TargetHidden
    ) -> None:
        """A speculative step was committed (draft-extend)."""
        ...

    def skipped(self, rows: torch.Tensor, host_rows: Sequence[int], target: TargetHidden) -> None:
        """A plain step was committed: one token a row. The method may catch up later, but before it proposes."""
        ...

    def reusable_len(self, row: int, seq_len: int) -> int:
        """How many of the row's first `seq_len` KV rows are right in the method's own pool."""
        ...


class ProposerFactory(Protocol):
    """Builds a method's proposer beside a loaded target. Raises MethodError on a draft that does not fit."""

    def __call__(self, context: ProposerContext) -> Proposer: ...


@dataclass(frozen=True)
class ProposerContext:
    """draft: source of the draft checkpoint, None for methods without one. num_pages: of the target's pool.
    check_vocabulary raises MethodError when the checkpoint at a path has not the target's vocabulary."""

    state: RequestState
    num_pages: int
    page_size: int
    dtype: torch.dtype
    draft: str | None
    check_vocabulary: Callable[[Path], None]
