"""Finds what is wrong with one request that no other should learn of. Counts the steps that fail."""

from __future__ import annotations

from collections.abc import Iterable

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import Submit

MAX_FAILED_STEPS = 3  # in a row, before the engine calls itself unready


class Failures:
    """Steps of a single request that failed, one after the other. last: the failure, in words."""

    def __init__(self) -> None:
        self._steps = 0
        self.last = ""

    def count(self, error: Exception, alone: bool) -> None:
        """alone: nothing else can be at fault."""
        self.last = f"{type(error).__name__}: {error}"
        self._steps += alone

    def end(self) -> None:
        """A step went well."""
        self._steps = 0

    @property
    def unready(self) -> str | None:
        if self._steps < MAX_FAILED_STEPS:
            return None
        return f"{self._steps} steps in a row failed, the last one with: {self.last}"


def fault(submit: Submit, vocab_size: int | None) -> RequestError | None:
    """vocab_size: tokens that the model can read and say; None: not known."""
    if vocab_size is None:
        return None
    params = submit.params
    named: list[tuple[str, Iterable[int]]] = [
        ("prompt", submit.prompt),
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
    ]
    for field, token_ids in named:
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= vocab_size:
            outside = low if low < 0 else high
            return RequestError(f"{field} has the token {outside}; 0 to {vocab_size - 1} would work", field)
    return None
