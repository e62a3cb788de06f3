"""Masks of one matcher as bytes, made as those of a batch are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pilotfish_engine.sampling.matcher import fill
from pilotfish_engine.types import GrammarMatcher


def masks(matcher: GrammarMatcher, token_ids: Sequence[int], parents: Sequence[int], vocab: int) -> list[bytes | None]:
    """For each node of a tree, of a vocabulary of so many tokens; None: any may follow."""
    asked = matcher.ask(token_ids, parents)
    made = np.full((len(asked), -(-vocab // 32) * 4), 0xFF, np.uint8)
    fill([(one, at) for at, one in enumerate(asked) if one is not None], made)
    return [None if one is None else made[at].tobytes() for at, one in enumerate(asked)]
