"""What may come before a grammar: reasoning, or text as far as a call's opening tag, in which any token may follow.

An end may lie across tokens. Of the last stage it ends with a token, but for blanks: tokens that would go on behind it
are masked, so that the grammar sees every byte of what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pilotfish_engine.messages import Stage

BLANK_BYTES = b" \t\r\n"


@dataclass(frozen=True)
class Place:
    """Within stage number `stage`. begun: False where it may yet be left out. tail: the last bytes, which an end may
    begin with."""

    stage: int
    begun: bool
    tail: bytes = b""


class Stages:
    """pieces[id]: the bytes of a token, empty for special ones. mask_bytes: of a mask over the model's vocabulary."""

    def __init__(self, stages: Sequence[Stage], pieces: Sequence[bytes], mask_bytes: int) -> None:
        self._stages = stages
        self._ends = [tuple(end.encode() for end in stage.ends) for stage in stages]
        self._pieces = pieces
        self._mask_bytes = mask_bytes
        self.forbidden = self._forbidden()

    def first(self) -> Place | None:
        return self._at(0)

    def step(self, place: Place, token: int) -> tuple[Place | None, bool]:
        """The place behind a token, None: the grammar's. False: there the token itself is still to be taken."""
        stage = self._stages[place.stage]
        if not place.begun:
            if token == stage.begin:
                return Place(place.stage, True), True
            following = self._at(place.stage + 1)
            return (None, False) if following is None else self.step(following, token)
        if token in stage.end_tokens:
            return self._at(place.stage + 1), True
        return self._text(place, place.tail + self._piece(token)), True

    def mask(self, place: Place) -> bytes | None:
        """The tokens that may follow within a stage, a bit each; None: any."""
        last = place.begun and place.stage == len(self._stages) - 1
        return self.forbidden.get(_overlap(place.tail, self._ends[-1])) if last else None

    def optional(self, place: Place) -> int | None:
        """The token that begins the stage, where otherwise the grammar begins."""
        leaves = not place.begun and place.stage == len(self._stages) - 1
        return self._stages[place.stage].begin if leaves else None

    @cached_property
    def _longest(self) -> int:
        return max((len(end) for ends in self._ends for end in ends), default=1)

    def _at(self, number: int) -> Place | None:
        return Place(number, self._stages[number].begin is None) if number < len(self._stages) else None

    def _text(self, place: Place, text: bytes) -> Place | None:
        found = [(at, end) for end in self._ends[place.stage] if (at := text.find(end)) >= 0]
        if not found:
            return Place(place.stage, True, text[max(0, len(text) - self._longest + 1) :])
        at, end = min(found)
        following = self._at(place.stage + 1)
        return None if following is None or not following.begun else self._text(following, text[at + len(end) :])

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] if token < len(self._pieces) else b""

    def _forbidden(self) -> dict[bytes, bytes]:
        """By what an end has begun with: a mask, where some token would go on behind the end of the last stage."""
        ends = self._ends[-1]
        closing = tuple({end[-1:] for end in ends})
        longer = [i for i, piece in enumerate(self._pieces) if len(piece) > 1]
        likely = [i for i in longer if any(last in self._pieces[i] for last in closing)]

        masks = {}
        for begun in {end[:length] for end in ends for length in range(len(end))}:
            bad = [i for i in likely if self._goes_on(begun + self._pieces[i], ends)]
            if bad:
                mask = bytearray(b"\xff" * self._mask_bytes)
                for token in bad:
                    mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
                masks[begun] = bytes(mask)
        return masks

    def _goes_on(self, text: bytes, ends: Sequence[bytes]) -> bool:
        found = [(at, end) for end in ends if (at := text.find(end)) >= 0]
        if not found:
            return False
        at, end = min(found)
        return bool(text[at + len(end) :].strip(BLANK_BYTES))


def _overlap(tail: bytes, ends: Sequence[bytes]) -> bytes:
    """The longest end of `tail` that one of the ends begins with."""
    for length in range(min(len(tail), max(map(len, ends), default=1) - 1), 0, -1):
        if any(end.startswith(tail[-length:]) for end in ends):
            return tail[-length:]
    return b""
