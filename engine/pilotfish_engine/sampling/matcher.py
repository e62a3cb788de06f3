"""Follows an answer through its grammar. Says what may follow each node of a draft tree.

Masks are made in two parts, so that those of a whole batch are one call of the library: `ask` walks the tree and says
whose masks are wanted, `finish` adds to each what the library does not know. Torch-free; runs on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from pilotfish_engine.sampling.source import reason
from pilotfish_engine.sampling.stages import Place, Stages
from pilotfish_engine.types import MaskOfNode

NO_TOKEN = "no token of the model continues the answer as the grammar wants it"

Mask = NDArray[np.uint8]  # [bytes], a bit for each token, lowest first
Masks = NDArray[np.uint8]  # [N, bytes]


@dataclass(frozen=True)
class _Cursor:
    """A place before the grammar, or None within it; `inner` is the grammar's state."""

    place: Place | None
    inner: LLMatcher


class Matcher:
    """One answer's place in its grammar, or in what comes before it. error: why it cannot go on, or None."""

    def __init__(
        self,
        inner: LLMatcher,
        ends: Sequence[int],
        ends_late: bool,
        stages: Stages | None = None,
        doubtful: Sequence[int] = (),
    ) -> None:
        """inner: nobody else's. doubtful: tokens of which the library's masks have too many."""
        self._doubtful = doubtful
        self._stages = stages
        self._cursor = _Cursor(None if stages is None else stages.first(), inner)
        self._ends = frozenset(ends)
        self._ends_late = ends_late
        self._ended = False
        self.error: str | None = None

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were committed. What follows an end is ignored."""
        for token in token_ids:
            if self._ended or self.error is not None:
                return
            if token in self._ends:
                self._ended = True
                continue
            following = self._behind(self._cursor, token)
            if following is None:
                self.error = reason(self._cursor.inner)
            else:
                self._cursor = following

    def ask(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[NodeMask | None]:
        """For each node of a tree what makes its mask. None: any token may follow it, as the answer has ended there or
        the grammar has not begun, or the node is none that could be accepted. Node 0 is the last committed token;
        parents come before their children."""
        found: list[NodeMask | None] = [None] * len(token_ids)
        if self._ended or self.error is not None:
            return found
        cursors: list[_Cursor | None] = [self._cursor, *[None] * (len(token_ids) - 1)]
        found[0] = self._node_mask(self._cursor, root=True)
        for node in range(1, len(token_ids)):
            above, token = cursors[parents[node]], token_ids[node]
            if above is None or token in self._ends or not self._allows(above, token):
                continue
            # a parent's own state stays as it is: its mask is still to be made
            copied = above if above.place is not None else _Cursor(None, above.inner.deep_copy())
            behind = self._behind(copied, token)
            if behind is not None:
                cursors[node], found[node] = behind, self._node_mask(behind)
        return found

    def _node_mask(self, cursor: _Cursor, root: bool = False) -> NodeMask | None:
        begin = None
        if cursor.place is not None and self._stages is not None:
            begin = self._stages.optional(cursor.place)
            if begin is None:
                fixed = self._stages.mask(cursor.place)
                return None if fixed is None else NodeMask(self, None, root, fixed)
        # states before the grammar share its first one, and two masks of one state are not made at once
        inner = cursor.inner if cursor.place is None else cursor.inner.deep_copy()
        return NodeMask(self, inner, root, begin=begin)

    def _allows(self, cursor: _Cursor, token: int) -> bool:
        if cursor.place is None or self._stages is None:
            return cursor.inner.validate_tokens([token]) == 1
        mask = self._stages.mask(cursor.place)
        return mask is None or bool(mask[token >> 3] >> (token & 7) & 1)

    def _behind(self, cursor: _Cursor, token: int) -> _Cursor | None:
        """None: the token cannot follow. A cursor within the grammar is used up; of one before it the grammar is left
        as it is, for another branch to begin."""
        if cursor.place is None:
            return cursor if cursor.inner.consume_token(token) else None
        assert self._stages is not None, "a place is one of the stages"
        place, taken = self._stages.step(cursor.place, token)
        if place is not None:
            return _Cursor(place, cursor.inner)
        begun = _Cursor(None, cursor.inner.deep_copy())
        return begun if taken else self._behind(begun, token)

    def finish(self, wanted: NodeMask, mask: Mask) -> None:
        """What the library's mask does not have: what it lets through too often, ends of answers, a stage's begin."""
        inner = wanted.inner
        if inner is None:
            return
        if inner.is_error():
            mask.fill(0xFF)  # no answer goes on from here: of a root the request ends, another is not accepted
            if wanted.root:
                self.error = reason(inner)
            return
        for token in self._doubtful:
            if mask[token >> 3] >> (token & 7) & 1 and not inner.validate_tokens([token]):
                mask[token >> 3] &= 0xFF ^ (1 << (token & 7))
        may_end = inner.is_accepting() and (inner.is_stopped() or not self._ends_late)
        for token in self._ends:
            bit = 1 << (token & 7)
            mask[token >> 3] = mask[token >> 3] | bit if may_end else mask[token >> 3] & (0xFF ^ bit)
        if wanted.begin is not None:
            mask[wanted.begin >> 3] |= 1 << (wanted.begin & 7)
        if wanted.root and not mask.any():
            self.error = NO_TOKEN


@dataclass(frozen=True)
class NodeMask:
    """How a node's mask is made: by the library of `inner`, where there is one, else as `fixed` says; then `finish`.
    begin: a token that may follow beside those of the grammar."""

    matcher: Matcher
    inner: LLMatcher | None
    root: bool
    fixed: bytes = b""
    begin: int | None = None

    def finish(self, mask: Mask) -> None:
        if self.inner is None:
            mask[:] = np.frombuffer(self.fixed, np.uint8)
        self.matcher.finish(self, mask)


@cache
def _executor() -> LLExecutor:
    """Its threads come with the first mask."""
    return LLExecutor()


def fill(wanted: Sequence[tuple[MaskOfNode, int]], masks: Masks) -> None:
    """Makes each mask at its place, all in one call of the library. masks: without gaps; other places stay."""
    matched = [(one.inner, place) for one, place in wanted if one.inner is not None]
    if matched:
        assert masks.flags.c_contiguous
        _executor().unsafe_compute_mask_ptr(matched, masks.ctypes.data, masks.shape[1], masks.shape[0])
    for one, place in wanted:
        one.finish(masks[place])
