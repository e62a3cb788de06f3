"""Which of the target's tokens a draft can say: the most frequent ones in answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish_engine.train.sequences import Answered


@dataclass(frozen=True)
class DraftVocabulary:
    """token_ids: int64 [draft vocabulary], ascending. coverage: their share of the counted tokens."""

    token_ids: Tensor
    coverage: float

    def maps(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """d2t int64 (the target's id is i + d2t[i]) and t2d bool [vocab_size], as EAGLE-3 checkpoints have them."""
        t2d = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, self.token_ids, True)
        return self.token_ids - torch.arange(len(self.token_ids)), t2d


def choose(sequences: Sequence[Answered], size: int, vocab_size: int) -> DraftVocabulary:
    """Of equally frequent tokens the lower ids; where fewer than `size` occur, the lowest ids of the others too."""
    counts: Counter[int] = Counter()
    for one in sequences:
        counts.update(one.token_ids[one.prompt_len :])
    best = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[: min(size, vocab_size)]
    covered = sum(counts[token] for token in best)
    return DraftVocabulary(torch.tensor(sorted(best)), covered / max(1, counts.total()))
