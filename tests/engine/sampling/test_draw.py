"""The draw: noise that is what it should be, draws with the right probabilities, and filters that never let a ruled-out
token by."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.sampling.draw import NONE, SamplingRows, choose, draft_logits, gumbel


def rows(count: int, temperature=1.0, top_k=8, top_p=1.0, min_p=0.0, filtered=True) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        seeds=torch.arange(count),
        filtered=filtered,
    )


def test_the_noise_is_gumbel_s_and_independent():
    noise = gumbel(torch.arange(300), torch.arange(300) * 7, torch.arange(2000))
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    counts = torch.histc(torch.exp(-torch.exp(-noise.double())), bins=50, min=0, max=1)
    expected = noise.numel() / 50
    assert float(((counts - expected) ** 2 / expected).sum()) < 100  # 49 degrees of freedom
    other_seeds = gumbel(torch.arange(300) + 1, torch.arange(300) * 7, torch.arange(2000))
    for other in (noise.roll(1, 0), noise.roll(1, 1), other_seeds):
        assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1])) < 0.006
    some = torch.tensor([1999, 5, 700])
    assert torch.equal(gumbel(torch.tensor([9]), torch.tensor([63]), some), noise[9:10, some])


def test_draws_have_the_probabilities_of_the_logits():
    probs, count = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.009, 0.001]), 200_000
    positions = torch.arange(count)
    parameters = rows(1, top_k=6, filtered=False)
    expanded = replace(
        parameters,
        **{n: getattr(parameters, n).expand(count) for n in ("temperature", "top_k", "top_p", "min_p", "seeds")},
    )
    drawn = choose(probs.log().expand(count, -1), positions, expanded)
    expected = probs.double() * count
    assert float(((torch.bincount(drawn, minlength=6) - expected) ** 2 / expected).sum()) < 20  # 5 degrees of freedom


def test_a_draft_with_the_target_s_noise_nearly_reaches_what_any_rule_could_accept():
    """The ratio rule accepts a sampled draft with the sum of min(p, q), the most that is possible; a draft that takes
    its most probable token, with p of it. Sharing the noise guarantees (1 − d) / (1 + d), d the distance of p and q."""
    generator = torch.Generator().manual_seed(3)
    target = 2.5 * torch.randn(4000, 50, generator=generator)
    draft = target + 0.7 * torch.randn(4000, 50, generator=generator)
    parameters = rows(4000, top_k=50, filtered=False)
    positions = torch.arange(4000)
    agreed = draft_logits(draft, positions, parameters).argmax(1) == choose(target, positions, parameters)
    p, q = torch.softmax(target, 1), torch.softmax(draft, 1)
    possible = float(torch.minimum(p, q).sum(1).mean())
    distance = 1 - torch.minimum(p, q).sum(1)
    shared = float(agreed.double().mean())
    assert shared > float(((1 - distance) / (1 + distance)).mean()) - 0.02
    assert 0.93 * possible < shared < possible + 0.02
    assert shared > float(p.gather(1, q.argmax(1, keepdim=True)).mean()) + 0.05


def test_a_greedy_draft_is_that_of_its_logits_whatever_its_neighbours_are():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    parameters = rows(3, filtered=False)
    parameters.temperature[1] = 0.0
    scores = draft_logits(logits, torch.arange(3), parameters)
    assert torch.equal(scores[1], logits[1])
    assert torch.equal(draft_logits(logits, torch.arange(3), None), logits)
    own = torch.tensor([7, 3, 0, 1, 6, 5, 4, 2])  # a draft vocabulary in another order draws the same tokens
    reordered = draft_logits(logits[:, own], torch.arange(3), parameters, own)
    torch.testing.assert_close(reordered, scores[:, own])


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


@pytest.mark.parametrize("hot", [0.0, 0.7])
@pytest.mark.parametrize("filtered", [False, True])
def test_numbers_that_give_no_token_give_none_and_leave_other_rows_alone(hot, filtered):
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, 2.0, 0.5], [1.0, nan, 2.0], [-inf] * 3, [0.0, inf, 1.0], [-inf, 3.0, -inf]])
    n = len(logits)
    rows = SamplingRows(
        torch.full((n,), hot), torch.full((n,), 2), torch.full((n,), 0.9), torch.zeros(n), torch.arange(n), filtered
    )
    drawn = choose(logits, torch.arange(n), rows)
    assert drawn[1:4].tolist() == [NONE] * 3
    assert drawn[4] == 1
    alone = SamplingRows(
        rows.temperature[:1], rows.top_k[:1], rows.top_p[:1], rows.min_p[:1], rows.seeds[:1], filtered
    )
    assert drawn[0] == choose(logits[:1], torch.arange(1), alone)[0]
    assert choose(logits, torch.arange(n), None).tolist() == [1, NONE, NONE, NONE, 1]
