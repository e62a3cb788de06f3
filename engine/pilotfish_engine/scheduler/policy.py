"""Which work the next iteration does: pure functions of counts. No I/O, no clock, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish_engine.types import Chunk


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def missing_pages(known_tokens: int, reserve_tokens: int, page_size: int, held: int) -> int:
    """Pages to add so that a step may write `reserve_tokens` rows from the last known token's row on, that one
    included."""
    return max(0, pages_for(known_tokens + reserve_tokens, page_size) - held)


def too_large(known_tokens: int, room: int) -> str:
    return (
        f"the request needs KV for {known_tokens} tokens and a step's drafts, and the cache holds {room} tokens in "
        "all; send a shorter prompt or fewer max_tokens"
    )


@dataclass(frozen=True)
class PrefillWork:
    """A request whose known tokens are not all computed: rows [computed_len, known_len) are to do."""

    row: int
    computed_len: int
    known_len: int


def plan_chunks(work: Sequence[PrefillWork], chunk_size: int) -> list[Chunk]:
    """First come, first served, until `chunk_size` tokens are planned; a long prompt goes through in several calls."""
    chunks: list[Chunk] = []
    budget = chunk_size
    for item in work:
        if budget <= 0:
            break
        end = min(item.known_len, item.computed_len + budget)
        chunks.append(Chunk(item.row, item.computed_len, end, end == item.known_len))
        budget -= end - item.computed_len
    return chunks
