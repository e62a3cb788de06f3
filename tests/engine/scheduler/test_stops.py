"""Where an answer ends, by stop strings that come before and after its least length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_engine.messages import SamplingParams, Submit
from pilotfish_engine.scheduler.stops import End, stop_checker
from pilotfish_engine.types import WorkerLimits
from tests.engine.soak.traffic import Pieces, stop_text

LIMITS = WorkerLimits(max_running_requests=1, max_model_len=64, page_size=4, num_pages=16)


def end_of(tokens: list[int], at_once: int, **params: object) -> tuple[int, End | None]:
    wanted = SamplingParams(max_tokens=40, **params)  # type: ignore[arg-type]
    checker = stop_checker(Submit(request_id="a", prompt=[0, 0, 0], params=wanted), LIMITS, stop_text)
    kept = 0
    while kept < len(tokens):
        count, end = checker.push(tokens[kept : kept + at_once], 3 + kept)
        kept += count
        if end is not None:
            return kept, end
    return kept, None


@given(
    tokens=st.lists(st.sampled_from([0, 4, 8, 1, 2]), max_size=20),
    stops=st.lists(st.text("aeic", min_size=1, max_size=3), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
    at_once=st.integers(1, 5),
)
def test_the_first_stop_string_that_is_complete_behind_min_tokens_ends(tokens, stops, min_tokens, at_once):
    kept, end = end_of(tokens, at_once, stop=tuple(stops), min_tokens=min_tokens)
    pieces = b"".join(Pieces().piece(token) for token in tokens)
    texts = [b"".join(map(Pieces().piece, tokens[:n])).decode(errors="ignore") for n in range(len(tokens) + 1)]
    if b"\xc3" in pieces or b"\xa9" in pieces:
        return  # halves of characters: how a text is cut is tested elsewhere
    for count in range(1, len(tokens) + 1):
        before, text = texts[count - 1], texts[count]
        complete = [text.find(stop, max(0, len(before) - len(stop) + 1)) for stop in stops]
        starts = [start for start in complete if start >= 0]
        if count > min_tokens and starts:
            assert (kept, end) == (count, End("stop", min(starts)))
            return
    assert (kept, end) == (len(tokens), None)


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 2), (1, 2), (2, 3), (3, 4), (4, 5)])
def test_one_that_overlaps_an_earlier_one_ends(min_tokens, kept):
    assert end_of([0, 0, 0, 0, 0], 5, stop=("aa",), min_tokens=min_tokens)[0] == kept
