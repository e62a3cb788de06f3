"""Where an answer ends: the earliest of stop token, stop string and length, token by token in order.

Pure but for the text it is given, which decodes tokens as the client will see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pilotfish_engine.messages import FinishReason


class StopText(Protocol):
    """The text of one answer, searched for its stop strings."""

    def append(self, token_id: int) -> int | None:
        """The characters of the answer before the stop string that this token completes, or None."""
        ...


StopTextFactory = Callable[[Sequence[str]], StopText]


@dataclass(frozen=True)
class End:
    """text_end: for a stop string, where it begins in the answer's text, in characters."""

    reason: FinishReason
    text_end: int | None = None


@dataclass(frozen=True)
class StopChecker:
    """Fed every token of one answer, once, in order. stop_token_ids include the model's own end tokens unless ignored.

    max_len: known tokens, the prompt's included, at which the answer ends for length.
    """

    stop_token_ids: frozenset[int]
    text: StopText | None
    max_len: int

    def push(self, token_ids: Sequence[int], known_len: int) -> tuple[int, End | None]:
        """How many of the tokens that follow `known_len` known ones are the answer's, and its end if it is among
        them."""
        for count, token_id in enumerate(token_ids, 1):
            if token_id in self.stop_token_ids:
                return count, End("stop")
            if self.text is not None and (text_end := self.text.append(token_id)) is not None:
                return count, End("stop", text_end)
            if known_len + count >= self.max_len:
                return count, End("length")
        return len(token_ids), None
