"""What a method implements: one file with a class of this protocol, and one row of `contract.methods`.

Knows nothing about how its candidates are verified. What a proposer keeps of a row stands in the request
state (`state.kept`), so that a request can leave with it. It may have a KV pool of its own, whose pages have the
numbers of the target's: a row's pages serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.methods import Limits
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.speculation.tree import Candidates
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.tokenizer import Tokenizer
from pilotfish_engine.types import Chunk


@dataclass(frozen=True)
class TargetHidden:
    """What the target pass leaves for drafts that read it. hidden: [N, H]; aux: one [N, H] for each wanted layer."""

    hidden: torch.Tensor
    aux: tuple[torch.Tensor, ...]


class Proposer(Protocol):
    """Drafts for a batch. Settings are within the limits that `check` declared."""

    aux_layers: tuple[int, ...]  # target layers whose inputs the method reads; empty for none
    lookahead: int  # how many tokens after it a row of the method's KV depends on

    def slots_needed(self, settings: Settings) -> int:
        """Rows of its own KV pool that a step may write. They begin with the last known token's row; 0 without a
        pool."""
        ...

    def admit(self, row: int, cached_len: int) -> None:
        """A row begins; its first `cached_len` KV rows are right in the method's own pool too."""
        ...

    def extend(self, chunks: Sequence[Chunk], target: TargetHidden) -> None:
        """Prompt chunks went through the target. The token after each chunk is known by now."""
        ...

    def due(self, rows: Rows, settings: Settings) -> list[int] | None:
        """Before each step, the host's part of it: how many of each row's last known tokens, which plain steps left,
        the method has to read first. They count as read from here on. None: nothing now."""
        ...

    def catch_up(self, rows: Rows, counts: torch.Tensor, width: int) -> None:
        """It reads the last counts[i] ≤ width of each row, int64 [B]; 0 leaves a row as it is. From here to the step's
        end the method is tensor code that a CUDA graph may hold: it keeps nothing on the host, and does the same for
        other rows."""
        ...

    def propose(self, rows: Rows, settings: Settings) -> Candidates: ...

    def accepted(self, rows: Rows, settings: Settings, verdict: Verdict, target: TargetHidden) -> None:
        """A speculative step was committed (draft-extend)."""
        ...

    def skipped(self, rows: Rows, target: TargetHidden) -> None:
        """A plain step was committed: one token a row. The method may read it later, but before it proposes."""
        ...

    def reusable_len(self, row: int, seq_len: int) -> int:
        """How many of the row's first `seq_len` KV rows are right in its own pool."""
        ...


@dataclass(frozen=True)
class Models:
    """What a method is judged by before any weight is read. check_vocabulary raises MethodError when the checkpoint at
    a path, with so many tokens, has not the target's vocabulary. corpus: a file of texts to draft from. tokenizer
    loads the target's, None where the checkpoint comes without one."""

    target: Path
    target_shape: ModelShape
    draft: Path | None
    check_vocabulary: Callable[[Path, int], None]
    corpus: Path | None = None
    tokenizer: Callable[[], Tokenizer | None] = lambda: None


@dataclass(frozen=True)
class ProposerContext:
    """Beside what a proposer is built: the loaded target, the rows' state, and the target's pool of `num_pages`."""

    models: Models
    target: Decoder
    state: RequestState
    num_pages: int
    page_size: int
    dtype: torch.dtype


class MethodModule(Protocol):
    """The functions of a method's module."""

    @staticmethod
    def recognises(models: Models) -> bool:
        """Whether the checkpoints say that they are of this method. Reads metadata only."""
        ...

    @staticmethod
    def check(models: Models) -> Limits:
        """Declares what its drafts can do with these checkpoints. Reads metadata alone, before the target is loaded.
        Raises MethodError or CheckpointError where the checkpoints do not fit the method."""
        ...

    @staticmethod
    def build(context: ProposerContext) -> Proposer: ...
