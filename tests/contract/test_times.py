"""A profile corrected by steps: what was measured is told again, and what was not follows its neighbours."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_engine.contract.goodput import spec_step_ms
from pilotfish_engine.contract.speculation import PLAIN, Settings
from pilotfish_engine.contract.times import MeasuredCosts
from tests.contract.synthetic import H200

CHAINS = [PLAIN, *(Settings(num_steps=k, topk=1, num_draft_tokens=k + 1) for k in range(1, 6))]
BATCH, CONTEXT = 16, 8000


def expected(settings: Settings, context: int = CONTEXT) -> float:
    return spec_step_ms(H200, BATCH, context, settings)


def test_without_a_step_it_is_the_profile() -> None:
    subject = MeasuredCosts(H200)
    assert [subject.step_ms(s, BATCH, CONTEXT) for s in CHAINS] == [expected(s) for s in CHAINS]


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.7])
def test_what_ran_takes_what_it_took_and_others_are_as_far_off(factor: float) -> None:
    subject = MeasuredCosts(H200)
    for _ in range(20):
        subject.observe(CHAINS[3], BATCH, CONTEXT, factor * expected(CHAINS[3]))
    for settings in CHAINS:
        assert subject.step_ms(settings, BATCH, CONTEXT) == pytest.approx(factor * expected(settings), rel=1e-3)


def test_each_setting_has_its_own_error_and_those_between_two_lie_between() -> None:
    subject, errors = MeasuredCosts(H200), {CHAINS[0]: 1.0, CHAINS[2]: 1.2, CHAINS[4]: 1.6}
    for _ in range(100):
        for settings, error in errors.items():
            subject.observe(settings, BATCH, CONTEXT, error * expected(settings))
    for settings, error in errors.items():
        assert subject.step_ms(settings, BATCH, CONTEXT) / expected(settings) == pytest.approx(error, rel=0.01)
    between = [subject.step_ms(s, BATCH, CONTEXT) / expected(s) for s in CHAINS]
    assert between == sorted(between)
    assert between[5] == pytest.approx(1.6, rel=0.02)


def test_a_machine_that_becomes_slow_for_all_moves_what_does_not_run_too() -> None:
    """After a few steps of the one that runs, and in proportion."""
    subject, slow = MeasuredCosts(H200), 1.3
    for _ in range(50):
        subject.observe(CHAINS[1], BATCH, CONTEXT, expected(CHAINS[1]))
        subject.observe(PLAIN, BATCH, CONTEXT, 0.9 * expected(PLAIN))
    for _ in range(40):
        subject.observe(CHAINS[1], BATCH, CONTEXT, slow * expected(CHAINS[1]))
    assert subject.step_ms(CHAINS[1], BATCH, CONTEXT) == pytest.approx(slow * expected(CHAINS[1]), rel=0.02)
    assert subject.step_ms(PLAIN, BATCH, CONTEXT) == pytest.approx((slow - 0.1) * expected(PLAIN), rel=0.08)


@pytest.mark.parametrize("differ", [-0.05, 0.05])
def test_what_the_first_steps_of_a_load_differ_by_does_not_add_up(differ: float) -> None:
    """Settings run in turn, a load each, and a load's first steps are faster (a cool GPU) or slower than its others."""
    subject = MeasuredCosts(H200)
    for settings in 4 * CHAINS:
        for step in range(80):
            ms = (1 + differ * 0.95**step) * expected(settings)
            subject.observe(settings, BATCH, CONTEXT, ms)
    for settings in CHAINS:
        assert subject.step_ms(settings, BATCH, CONTEXT) == pytest.approx(expected(settings), rel=1.2 * abs(differ))


def test_one_interrupted_step_moves_little() -> None:
    subject = MeasuredCosts(H200)
    for _ in range(50):
        subject.observe(PLAIN, BATCH, CONTEXT, expected(PLAIN))
    subject.observe(PLAIN, BATCH, CONTEXT, 100 * expected(PLAIN))
    assert subject.step_ms(PLAIN, BATCH, CONTEXT) < 1.1 * expected(PLAIN)


def test_an_unknown_batch_is_as_far_off_as_the_next_smaller_one() -> None:
    subject = MeasuredCosts(H200)
    subject.observe(PLAIN, 4, CONTEXT, 1.5 * spec_step_ms(H200, 4, CONTEXT, PLAIN))
    subject.observe(PLAIN, 64, CONTEXT, 1.1 * spec_step_ms(H200, 64, CONTEXT, PLAIN))
    ratios = [subject.step_ms(PLAIN, b, CONTEXT) / spec_step_ms(H200, b, CONTEXT, PLAIN) for b in (1, 4, 16, 64, 256)]
    assert ratios == pytest.approx([1.5, 1.5, 1.5, 1.1, 1.1])


def test_what_the_host_adds_is_added_to_every_setting() -> None:
    subject = MeasuredCosts(H200)
    for _ in range(100):
        subject.observe_host(BATCH, 2.0)
    assert [subject.step_ms(s, BATCH, CONTEXT) - expected(s) for s in CHAINS] == pytest.approx([2.0] * 6)


def test_the_least_is_far_below_what_never_ran_and_near_what_ran_often() -> None:
    subject = MeasuredCosts(H200)
    for _ in range(40):
        subject.observe(CHAINS[2], BATCH, CONTEXT, 2 * expected(CHAINS[2]))
    assert subject.least_ms(CHAINS[2], BATCH, CONTEXT) >= 0.98 * 2 * expected(CHAINS[2])
    assert subject.least_ms(PLAIN, BATCH, CONTEXT) <= expected(PLAIN)  # the error may be that of the other alone


@given(st.lists(st.tuples(st.sampled_from(CHAINS), st.sampled_from([1, 16, 200]), st.floats(1e-6, 1e9)), max_size=60))
def test_times_stay_positive_and_finite_whatever_is_measured(steps: list[tuple[Settings, int, float]]) -> None:
    subject, dice = MeasuredCosts(H200), random.Random(0)
    for settings, batch, ms in steps:
        subject.observe(settings, batch, dice.randrange(100_000), ms)
    for settings in CHAINS:
        for batch in (1, 16, 200):
            assert 0 < subject.least_ms(settings, batch, 1000) <= subject.step_ms(settings, batch, 1000) < 1e6
