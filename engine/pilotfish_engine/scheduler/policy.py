"""Which work the next iteration does: pure functions of counts. No I/O, no clock, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pilotfish_engine.types import Chunk


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def missing_pages(known_tokens: int, reserve_tokens: int, page_size: int, held: int) -> int:
    """Pages to add so that a step may write `reserve_tokens` rows. They begin with the last known token's row."""
    return max(0, pages_for(known_tokens + reserve_tokens, page_size) - held)


def too_large(known_tokens: int, room: int) -> str:
    return (
        f"the request needs KV for {known_tokens} tokens and a step's drafts, and the cache holds {room} tokens in "
        "all; send a shorter prompt or fewer max_tokens"
    )


@dataclass(frozen=True)
class Outlook:
    """What a request is expected to do: `to_come` more pages, then it ends and gives back these and `own`, the pages
    that it holds alone."""

    own: int
    to_come: int


def peak_growth(outlooks: Iterable[Outlook]) -> int:
    """The most pages that requests will need together beyond those they hold now. All grow equally fast.

    The need is largest at one of the ends: until then everyone still there has grown by as much as the one that ends,
    and those that ended before have given their pages back.
    """
    last_first = sorted(outlooks, key=lambda outlook: -outlook.to_come)
    returned = sum(outlook.own for outlook in last_first)
    peak = 0
    for still_there, outlook in enumerate(last_first, 1):
        returned -= outlook.own
        peak = max(peak, still_there * outlook.to_come - returned)
    return peak


@dataclass(frozen=True)
class PrefillWork:
    """A request whose known tokens are not all computed: rows [computed_len, known_len) are to do."""

    row: int
    computed_len: int
    known_len: int


def plan_chunks(work: Sequence[PrefillWork], chunk_size: int) -> list[Chunk]:
    """Chunks of `chunk_size` tokens together. Half of them are the first one's by right, so that many short prompts do
    not hold up a long one; the rest goes to those with least to do, so that a long one does not hold up short ones."""
    left = [item.known_len - item.computed_len for item in work]
    share = [0] * len(work)
    budget = chunk_size
    if work:
        share[0] = min(left[0], (chunk_size + 1) // 2)
        budget -= share[0]
    for number in sorted(range(len(work)), key=lambda number: left[number] - share[number]):
        more = min(left[number] - share[number], budget)
        share[number] += more
        budget -= more
    return [
        Chunk(item.row, item.computed_len, item.computed_len + tokens, item.computed_len + tokens == item.known_len)
        for item, tokens in zip(work, share, strict=True)
        if tokens
    ]
