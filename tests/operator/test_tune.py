"""The envelope from load, profile and acceptance: on a fake clock."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.contract.goodput import Acceptance
from pilotfish_engine.contract.speculation import CostProfile, Envelope
from pilotfish_operator.tune import COOL_DOWN, ENOUGH_STEPS, State, Traffic, in_step, target_concurrency, traffic, tune
from tests.operator.engines import PROFILE, report

BOUNDS = Envelope(num_steps=5, topk=1, num_draft_tokens=6)
GOOD, POOR = Acceptance((0.8, 0.65, 0.5)), Acceptance((0.2, 0.03))


def seen(
    batch: int, acceptance: Acceptance | None = GOOD, profile: CostProfile | None = PROFILE, steps: int = ENOUGH_STEPS
) -> Traffic:
    return Traffic(batch, 100.0, 64, profile, acceptance, 2.0, steps)


def test_deep_drafts_at_low_load_shallow_ones_at_high_load() -> None:
    low, state = tune(BOUNDS, seen(1), [], State(), 0)
    high, _ = tune(BOUNDS, seen(40), [], state, 100)
    assert low.envelope.num_steps > high.envelope.num_steps >= 1
    assert "at 40 running" in high.reason
    assert high.changed is not None
    assert " → " in high.changed


def test_the_threshold_is_computed_and_a_given_one_is_kept() -> None:
    auto, _ = tune(BOUNDS, seen(1, POOR), [], State(), 0)
    assert isinstance(auto.envelope.disable_threshold, int)
    assert auto.crossover is not None
    assert auto.crossover < auto.envelope.disable_threshold < 64  # a better draft is not shut out
    given_one, _ = tune(BOUNDS.model_copy(update={"disable_threshold": 7}), seen(1, POOR), [], State(), 0)
    assert given_one.envelope.disable_threshold == 7


def test_few_steps_are_no_measurement() -> None:
    tuning, _ = tune(BOUNDS, seen(40, POOR, steps=ENOUGH_STEPS - 1), [], State(), 0)
    assert tuning.envelope == BOUNDS
    assert f"{ENOUGH_STEPS} speculative steps are needed" in tuning.reason


def test_where_plain_is_best_the_narrowest_envelope_is_held() -> None:
    tuning, _ = tune(BOUNDS, seen(40, Acceptance((0.01,))), [], State(), 0)
    assert (tuning.envelope.num_steps, tuning.envelope.topk, tuning.envelope.num_draft_tokens) == (1, 1, 2)


def test_a_profile_in_which_a_speculative_step_has_less_overhead_than_a_plain_one_is_not_believed() -> None:
    noisy = PROFILE.model_copy(update={"overhead_ms": 0.0, "plain_overhead_ms": 14.0})
    found = traffic([report(profile=noisy.model_dump())], None)
    assert found is not None
    assert isinstance(found.profile, CostProfile)
    assert found.profile.overhead_ms == 14.0


def test_fixed_is_the_spec_whatever_the_load() -> None:
    fixed = BOUNDS.model_copy(update={"tuning": "Fixed"})
    for batch in (1, 10, 60):
        assert tune(fixed, seen(batch), [], State(), 0)[0].envelope == fixed


def test_unknown_never_changes_an_envelope() -> None:
    held = Envelope(num_steps=2, topk=1, num_draft_tokens=3, disable_threshold=9)
    state = State(held, 0.0)
    for unknown in (None, seen(40, None), seen(40, GOOD, None)):
        tuning, after = tune(BOUNDS, unknown, [], state, 1000)
        assert tuning.envelope == held
        assert after == state
        assert "Bounds stay" in tuning.reason


def test_a_restarted_operator_takes_over_what_the_engines_hold() -> None:
    held = Envelope(num_steps=2, topk=1, num_draft_tokens=3, disable_threshold=9)
    assert tune(BOUNDS, None, [], State(), 0) == (tune(BOUNDS, None, [], State(), 0)[0], State())
    tuning, state = tune(BOUNDS, seen(40, None), [held, held, Envelope()], State(), 0)
    assert tuning.envelope == held
    assert state.envelope == held


def test_a_narrower_spec_is_obeyed_at_once() -> None:
    state = State(Envelope(num_steps=5, topk=4, num_draft_tokens=16, disable_threshold=9), 0.0)
    narrow = Envelope(num_steps=2, topk=1, num_draft_tokens=3)
    tuning, _ = tune(narrow, None, [], state, 0.1)
    assert (tuning.envelope.num_steps, tuning.envelope.topk, tuning.envelope.num_draft_tokens) == (2, 1, 3)


@given(batches=st.lists(st.integers(1, 64), min_size=2, max_size=80))
@settings(max_examples=60, deadline=None)
def test_never_two_changes_within_the_cool_down(batches: list[int]) -> None:
    state, changes = State(), []
    for i, batch in enumerate(batches):
        before = state.envelope
        tuning, state = tune(BOUNDS, seen(batch), [], state, i * 3.0)
        if before is not None and tuning.envelope != before:
            changes.append(i * 3.0)
    assert all(b - a >= COOL_DOWN for a, b in itertools.pairwise(changes))


@given(batch=st.integers(1, 64), accept=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_constant_load_settles_within_bounds(batch: int, accept: list[float]) -> None:
    state, envelopes = State(), []
    for i in range(12):
        tuning, state = tune(BOUNDS, seen(batch, Acceptance(tuple(accept))), [], state, i * 20.0)
        assert 1 <= tuning.envelope.num_steps <= BOUNDS.num_steps
        assert tuning.envelope.topk == 1
        assert tuning.envelope.num_draft_tokens <= BOUNDS.num_draft_tokens
        envelopes.append(tuning.envelope)
    assert envelopes[3:] == [envelopes[3]] * 9


def test_traffic_weighs_acceptance_by_steps_and_takes_the_smallest_engine() -> None:
    few = report(accept=(0.2,), accept_length=1.2, counters={"steps": 100}, max_running_requests=8)
    many = report(accept=(0.6, 0.4), accept_length=2.0, counters={"steps": 300}, running=3, context_tokens=500)
    found = traffic([few, many], concurrency=6.0)
    assert found is not None
    assert found.acceptance is not None
    assert round(found.acceptance.at_least(1), 3) == 0.5
    assert found.accept_length == 1.8
    assert (found.batch, found.max_batch, found.context) == (3, 8, 150.0)
    assert traffic([], 3.0) is None
    silent = traffic([report(accept_length=None, accept=())], None)
    assert silent is not None
    assert silent.acceptance is None


def test_target_concurrency() -> None:
    assert target_concurrency(12, None, BOUNDS, None) == 12
    assert target_concurrency("Auto", None, BOUNDS, None) is None
    assert target_concurrency("Auto", None, BOUNDS, seen(1)) == 44  # 70% of 64 places
    assert target_concurrency("Auto", 30, BOUNDS, seen(1, profile=None)) is None
    easy, hard = (target_concurrency("Auto", slo, BOUNDS, seen(1)) for slo in (50.0, 250.0))
    assert easy is not None
    assert hard is not None
    assert 1 <= hard < easy <= 64


def test_only_pods_with_another_envelope_need_one() -> None:
    reports = {"same": report(), "other": report(envelope={"num_steps": 2}), "plain": report(method="None")}
    assert in_step(reports, Envelope()) == ("same", "plain")
    assert in_step(reports, Envelope(num_steps=3)) == ("plain",)
