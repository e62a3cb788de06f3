"""Knows how long answers have lately been, and so how much is still to come. No I/O, no clock."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

KEPT = 64  # answers
FIRST_GUESS = 256  # tokens, while nothing is known


class AnswerLengths:
    def __init__(self) -> None:
        self._recent = deque([FIRST_GUESS], maxlen=KEPT)
        self._ascending = [FIRST_GUESS]

    def ended(self, tokens: int) -> None:
        """An answer came to its end, by itself or by its limit."""
        self._recent.append(tokens)
        self._ascending = sorted(self._recent)

    def to_come(self, so_far: int) -> int:
        """Tokens that an answer of `so_far` goes on for: what is right on average for those of late that were longer;
        one longer than all of them is as likely to end before as after it has doubled."""
        longer = self._ascending[bisect_right(self._ascending, so_far) :]
        return max(1, sum(longer) // len(longer) - so_far if longer else so_far)
