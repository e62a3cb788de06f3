"""Requests with which something is wrong, of every kind that a load may bring, mixed into a soak's traffic.

What a prompt or a parameter cannot say (a pass that raises, numbers that are no more) is done by `Faulty` to the row
whose seed asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish_engine.messages import Grammar, SamplingParams
from pilotfish_engine.scheduler.stops import StopText
from pilotfish_engine.types import Admission, Batch, CompiledGrammar, ForwardMode, GrammarMatcher, MaskOfNode, Read
from tests.engine.conformance.conftest import EOS, VOCAB
from tests.engine.conformance.harness import Watched
from tests.engine.soak.traffic import Asked, stop_text

IN_EXTEND, IN_DECODE, NO_NUMBERS, IN_ADMIT = SEEDS = (10_001, 10_002, 10_003, 10_004)
THROWN, PANIC = "a thrown reason", "a panic"
THROWING, PANICKING = Grammar("regex", THROWN), Grammar("regex", PANIC)
# of each kind: parameters, then the field and words of its error
KINDS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "token in a bias": ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias", "would work"),
    "stop token": ({"stop_token_ids": (-1,)}, "stop_token_ids", "would work"),
    "many biases": ({"logit_bias": tuple((n % VOCAB, 0.0) for n in range(301))}, "logit_bias", "at most would work"),
    "no grammar": ({"grammar": Grammar("regex", "A((")}, "grammar", "unclosed group"),
    "nothing follows": ({"grammar": Grammar("regex", "A(a|Bb)")}, "grammar", "grammar"),
    "matcher throws": ({"grammar": THROWING}, "grammar", THROWN),
    "matcher panics": ({"grammar": PANICKING}, "grammar", PANIC),
    "stop text throws": ({"stop": (THROWN,)}, None, THROWN),
    "NaN in the logits": ({"logit_bias": ((5, float("nan")),)}, None, "NaN"),
    "NaN in the KV": ({"seed": NO_NUMBERS}, None, "NaN"),
    "a prompt's pass raises": ({"seed": IN_EXTEND}, None, "lost in extend"),
    "a step raises": ({"seed": IN_DECODE}, None, "lost in decode"),
    "admission raises": ({"seed": IN_ADMIT}, None, "lost in admit"),
}
TOKEN = "token in the prompt"
NO_END = bytes([0xFF & ~(1 << EOS), *[0xFF] * (VOCAB // 8 - 1)])  # a mask that allows all else


def spoil(asked: Asked, random: Random) -> tuple[Asked, str]:
    """A request with one fault, which it lives long enough to show, and the fault's kind."""
    kind = random.choice([TOKEN, *KINDS])
    lasting = {"max_tokens": 25, "ignore_eos": True, "stop": (), "stop_token_ids": (), "grammar": None, "min_tokens": 0}
    if kind == TOKEN:
        return Asked((*asked.prompt[:40], VOCAB), asked.params), kind
    params = msgspec.structs.replace(asked.params, **lasting | KINDS[kind][0])
    return Asked(asked.prompt[:40], params), kind


def wrong(kind: str, error: str | None, field_name: str | None) -> str | None:
    """How an error is not the one that its fault should have, or None."""
    _, expected, words = KINDS.get(kind, ({}, "prompt", "would work"))
    if field_name != expected or error is None or words not in error:
        return f"{kind}: {field_name}: {error}"
    return None


class _Panic(BaseException):
    """What a panic of a library in Rust is to Python."""


class _AnyButTheEnd:
    inner = None

    def finish(self, mask: NDArray[np.uint8]) -> None:
        mask[:] = np.frombuffer(NO_END, np.uint8)


@dataclass
class _Throwing:
    how: BaseException
    error: str | None = None
    left: int = 3

    def start(self, answer: Sequence[int], stop_token_ids: Sequence[int], ignore_eos: bool) -> GrammarMatcher:
        return _Throwing(self.how, left=self.left - len(answer))

    def advance(self, token_ids: Sequence[int]) -> None:
        self.left -= len(token_ids)

    def ask(self, token_ids: Sequence[int], parents: Sequence[int]) -> Sequence[MaskOfNode]:
        if self.left <= 0:
            raise self.how
        return [_AnyButTheEnd()] * len(token_ids)


def throwing(grammar: Grammar) -> CompiledGrammar | None:
    return {
        THROWING: _Throwing(ValueError(THROWN)),
        PANICKING: _Throwing(_Panic(PANIC)),
    }.get(grammar)


class _ThrowingText:
    def append(self, token_id: int) -> int | None:
        raise ValueError(THROWN)


def text_of_stops(params: SamplingParams) -> StopText:
    return _ThrowingText() if params.stop == (THROWN,) else stop_text(params)


@dataclass
class Faulty(Watched):
    """Does to rows what their seeds ask for."""

    asks: dict[int, int] = field(default_factory=dict)

    def admit(self, admission: Admission) -> None:
        self.asks[admission.row] = admission.seed
        if admission.seed == IN_ADMIT:
            raise MemoryError("lost in admit")
        super().admit(admission)

    def launch(self, batch: Batch) -> Read:
        rows = batch.rows if batch.mode is ForwardMode.DECODE else [chunk.row for chunk in batch.chunks]
        asked = [self.asks[row] for row in rows]
        if batch.mode is ForwardMode.EXTEND and IN_EXTEND in asked:
            raise RuntimeError("lost in extend")
        if batch.mode is ForwardMode.DECODE:
            for row, seed in zip(rows, asked, strict=True):
                if seed == NO_NUMBERS:
                    self._break(row)
            if IN_DECODE in asked:
                inner = super().launch(batch)

                def lost() -> Any:
                    inner()
                    raise RuntimeError("lost in decode")

                return lost
        return super().launch(batch)

    def _break(self, row: int) -> None:
        """The last KV row becomes NaN; this admission has computed it, so that it is no other's."""
        state, kv = self.parts.step.state, self.parts.step.kv
        with torch.inference_mode():
            index = torch.tensor([row])
            slot = state.slots(index, (state.seq_lens[index] - 1).unsqueeze(1)).flatten()
            kv.k[:, slot] = torch.nan
