"""Where an answer ends: the earliest of stop token, stop string and length, token by token in order.

Pure but for the text it is given, which decodes tokens as the client will see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pilotfish_engine.messages import FinishReason, SamplingParams, Submit
from pilotfish_engine.types import WorkerLimits


class StopText(Protocol):
    """The text of one answer, searched for its stop strings."""

    def append(self, token_id: int) -> int | None:
        """The characters of the answer before the stop string that this token completes, or None."""
        ...


StopTextFactory = Callable[[SamplingParams], StopText]


@dataclass(frozen=True)
class End:
    """text_end: for a stop string, where it begins in the answer's text, in characters. error: why it failed, for the
    caller; field: the parameter that this is about."""

    reason: FinishReason
    text_end: int | None = None
    error: str | None = None
    field: str | None = None


@dataclass(frozen=True)
class StopChecker:
    """Fed every token of one answer, once, in order. stop_token_ids include the model's own end tokens unless ignored.

    max_len: known tokens, the prompt's included, at which the answer ends for length. min_len: so many known tokens do
    not end it for a stop string; one that is complete by then is text like any other.
    """

    stop_token_ids: frozenset[int]
    text: StopText | None
    max_len: int
    min_len: int = 0

    def push(self, token_ids: Sequence[int], known_len: int) -> tuple[int, End | None]:
        """Counts how many of the tokens that follow `known_len` known ones are the answer's. With it comes the end,
        if it is among them."""
        for count, token_id in enumerate(token_ids, 1):
            if token_id in self.stop_token_ids:
                return count, End("stop")
            text_end = None if self.text is None else self.text.append(token_id)
            if text_end is not None and known_len + count > self.min_len:
                return count, End("stop", text_end)
            if known_len + count >= self.max_len:
                return count, End("length")
        return len(token_ids), None


def stop_checker(submit: Submit, limits: WorkerLimits, stop_text: StopTextFactory | None) -> StopChecker:
    """Of a request's answer."""
    prompt_len, params = len(submit.prompt), submit.params
    endless = params.ignore_eos and params.grammar is None
    return StopChecker(
        stop_token_ids=frozenset(params.stop_token_ids) | (frozenset() if endless else limits.eos_token_ids),
        text=stop_text(params) if params.stop and stop_text is not None else None,
        max_len=min(prompt_len + params.max_tokens, limits.max_model_len),
        min_len=prompt_len + params.min_tokens,
    )
