"""What is best at a load: what was measured of drafts and of time, and nothing about when to ask."""

from __future__ import annotations

import pytest

from pilotfish_engine.contract.best import Best
from pilotfish_engine.contract.goodput import candidates, spec_rate, spec_step_ms
from pilotfish_engine.contract.preparation import ready
from pilotfish_engine.contract.speculation import PLAIN, Envelope, Settings
from tests.contract.synthetic import CONTEXT, CPU_NGRAM, H200, traffic

CHAINS = Envelope(num_steps=5, topk=1, num_draft_tokens=6)
DEEP = Settings(num_steps=5, topk=1, num_draft_tokens=6)


def told(accept_lens: list[int], factor: float = 1.0, settings: Settings = DEEP, steps: int = 200) -> Best:
    """Steps of these settings gave so much and took `factor` times what the profile says."""
    subject, batch = Best(CPU_NGRAM, 256), len(accept_lens)
    for _ in range(steps):
        context = batch * CONTEXT
        subject.observe(settings, context, accept_lens, factor * spec_step_ms(CPU_NGRAM, batch, context, settings))
    return subject


def test_before_any_step_it_is_the_profile_and_a_hope() -> None:
    subject = Best(H200, 256)
    assert (subject.accept_length, subject.accept(5), subject.findings) == (None, (), ())
    for settings in (PLAIN, *candidates(CHAINS)):
        assert subject.step_ms(settings, 4, 4 * CONTEXT) == pytest.approx(spec_step_ms(H200, 4, 4 * CONTEXT, settings))


@pytest.mark.parametrize(("accept_lens", "speculates"), [([6, 6], True), ([1, 1], False)])
def test_what_drafts_gave_decides(accept_lens: list[int], speculates: bool) -> None:
    choice = told(accept_lens).choice(2, 2 * CONTEXT, CHAINS)
    assert (choice.settings.num_steps > 0) == speculates
    assert choice.tokens_per_second >= choice.plain_tokens_per_second


@pytest.mark.parametrize(("factor", "is_best"), [(1.0, True), (8.0, False)])
def test_what_steps_took_decides_whatever_the_profile_says(factor: float, is_best: bool) -> None:
    """Plain steps take what the profile says."""
    subject = told([6, 6], factor)
    for _ in range(200):
        subject.observe(PLAIN, 2 * CONTEXT, [1, 1], spec_step_ms(CPU_NGRAM, 2, 2 * CONTEXT, PLAIN))
    assert (subject.choice(2, 2 * CONTEXT, CHAINS).settings == DEEP) == is_best


def test_a_rate_is_of_one_request_and_the_choice_has_the_largest() -> None:
    subject = told([3, 4, 2])
    choice = subject.choice(3, 3 * CONTEXT, CHAINS)
    rates = {one: 3000 * subject.rate(one, 3, 3 * CONTEXT) for one in (PLAIN, *candidates(CHAINS))}
    assert choice.tokens_per_second == pytest.approx(rates[choice.settings]) == pytest.approx(max(rates.values()))


def test_before_any_step_a_rate_is_that_of_the_formulas() -> None:
    subject, acceptance = told([1 + 2] * 4, steps=3000), traffic(3.0)
    assert subject.accept_length == pytest.approx(3.0)
    two = Settings(num_steps=2, topk=1, num_draft_tokens=3)
    assert 4000 * subject.rate(two, 4, 4 * CONTEXT) >= spec_rate(CPU_NGRAM, acceptance, 4, 4 * CONTEXT, two)


def test_what_never_ran_is_hoped_for_and_what_ran_often_is_known() -> None:
    """Hope is what makes a setting worth a probe: it is never below the estimate."""
    subject = told([2, 3], settings=Settings(num_steps=2, topk=1, num_draft_tokens=3))
    found = subject.prospects(candidates(CHAINS), 2, 2 * CONTEXT, ready)
    assert [one.settings for one in found] == list(candidates(CHAINS))
    assert all(one.hoped_rate >= one.rate for one in found)
    by_depth = {one.settings.num_steps: one.hoped_rate / one.rate for one in found}
    assert by_depth[5] > by_depth[2]


def test_the_threshold_is_the_load_from_which_plain_is_best() -> None:
    subject = told([2, 2, 3, 1])
    threshold = subject.threshold(CONTEXT, CHAINS)
    assert threshold is not None
    for batch, plain in ((threshold, True), (threshold - 1, False)):
        if batch >= 1:
            assert (subject.choice(batch, batch * CONTEXT, CHAINS).settings == PLAIN) == plain
