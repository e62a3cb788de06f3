"""The draw: uniform numbers that are uniform and independent of order, and filters that never let a ruled-out token
by."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.sampling.draw import SamplingRows, choose, uniform


def rows(count: int, temperature=1.0, top_k=8, top_p=1.0, min_p=0.0, filtered=True) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        seeds=torch.arange(count),
        greedy=False,
        filtered=filtered,
    )


def test_uniform_numbers_fill_the_interval_evenly():
    seeds = torch.arange(200).repeat_interleave(200)
    drawn = uniform(seeds, torch.arange(200).repeat(200))
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    counts = torch.histc(drawn, bins=20, min=0, max=1)
    expected = len(drawn) / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 60  # 19 degrees of freedom
    pairs = torch.stack([drawn.view(200, 200)[:, :-1].flatten(), drawn.view(200, 200)[:, 1:].flatten()])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02


@settings(deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=8, max_size=8),
    st.integers(1, 8),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.5),
    st.floats(0.2, 3.0),
)
def test_what_is_ruled_out_is_never_drawn(logits, top_k, top_p, min_p, temperature):
    table = torch.tensor([logits] * 400)
    drawn = set(choose(table, torch.arange(400), rows(400, temperature, top_k, top_p, min_p)).tolist())
    probs = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0)
    ranked = sorted(range(8), key=lambda token: -float(probs[token]))
    allowed, before = set(), 0.0
    total = sum(float(probs[token]) for token in ranked[:top_k])
    for token in ranked[:top_k]:
        if before < top_p * total * (1 + 1e-9) and float(probs[token]) >= min_p * float(probs[ranked[0]]) * (1 - 1e-6):
            allowed.add(token)
        before += float(probs[token])
    assert drawn <= allowed


def test_a_zero_probability_is_never_drawn_and_greedy_rows_are_greedy():
    logits = torch.tensor([[0.0, -float("inf"), 0.0, -float("inf")]] * 500)
    assert set(choose(logits, torch.arange(500), rows(500, top_k=4, filtered=False)).tolist()) == {0, 2}
    mixed = rows(2, top_k=4, filtered=False)
    mixed.temperature[0] = 0.0
    assert int(choose(torch.tensor([[0.0, 1.0, 3.0, 2.0]] * 2), torch.tensor([5, 5]), mixed)[0]) == 2
