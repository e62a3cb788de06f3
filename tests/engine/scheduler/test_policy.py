"""Chunk planning and page arithmetic, by tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_engine.scheduler.policy import PrefillWork, missing_pages, pages_for, plan_chunks
from pilotfish_engine.types import Chunk


@pytest.mark.parametrize(
    ("work", "chunk_size", "expected"),
    [
        ([], 8, []),
        ([PrefillWork(0, 0, 5)], 8, [Chunk(0, 0, 5, True)]),
        ([PrefillWork(0, 0, 20)], 8, [Chunk(0, 0, 8, False)]),
        ([PrefillWork(0, 16, 20), PrefillWork(1, 0, 9)], 8, [Chunk(0, 16, 20, True), Chunk(1, 0, 4, False)]),
        ([PrefillWork(0, 0, 8), PrefillWork(1, 0, 1)], 8, [Chunk(0, 0, 7, False), Chunk(1, 0, 1, True)]),
        ([PrefillWork(0, 0, 8), PrefillWork(1, 0, 8)], 8, [Chunk(0, 0, 8, True)]),
        (
            [PrefillWork(0, 0, 90), PrefillWork(1, 0, 3), PrefillWork(2, 4, 6)],
            8,
            [Chunk(0, 0, 4, False), Chunk(1, 0, 2, False), Chunk(2, 4, 6, True)],
        ),
    ],
)
def test_chunks(work, chunk_size, expected):
    assert plan_chunks(work, chunk_size) == expected


@given(st.lists(st.integers(1, 50), max_size=6), st.integers(1, 16))
def test_every_prompt_goes_through_once_in_order(lengths, chunk_size):
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        work = [PrefillWork(row, done[row], n) for row, n in enumerate(lengths) if done[row] < n]
        chunks = plan_chunks(work, chunk_size)
        assert 0 < sum(chunk.end - chunk.start for chunk in chunks) <= chunk_size
        for chunk in chunks:
            assert chunk.start == done[chunk.row]
            assert chunk.last == (chunk.end == lengths[chunk.row])
            done[chunk.row] = chunk.end


@given(st.integers(1, 500), st.integers(1, 64), st.sampled_from([1, 4, 16, 64]))
def test_pages_cover_every_row_that_a_step_may_write(known, reserve, page_size):
    held = pages_for(known, page_size)
    added = missing_pages(known, reserve, page_size, held)
    assert (held + added) * page_size >= known + reserve
    assert (held + added - 1) * page_size < known + reserve or added == 0
