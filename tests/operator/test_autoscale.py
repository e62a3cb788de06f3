"""Replicas from concurrency: on a fake clock, by tables and properties."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_operator.autoscale import Bounds, Mean, Reading, State, decide, mean, measure, wanted
from tests.operator.engines import report

BOUNDS = Bounds(1, 10, 8.0, stable=60, delay=120)


def steady(load: float, start: float, end: float, step: float = 3.0) -> tuple[Reading, ...]:
    count = round((end - start) / step)
    return tuple(Reading(start + i * step, start + (i + 1) * step, load) for i in range(count))


def run(loads: Sequence[float | None], replicas: int = 1, bounds: Bounds = BOUNDS, step: float = 3.0) -> list[int]:
    """Replicas after each reading; pods start at once. None: nothing could be read."""
    state, history = State(), [replicas]
    for i, load in enumerate(loads):
        missing = frozenset({"pod"}) if load is None else frozenset[str]()
        reading = Reading(i * step, (i + 1) * step, load or 0.0, missing)
        state = replace(state, readings=(*state.readings, reading))
        scale, state = decide(bounds, state, history[-1], history[-1], (i + 1) * step)
        history.append(scale.replicas)
    return history


@pytest.mark.parametrize(
    ("load", "current", "replicas"),
    [(0, 1, 1), (8, 1, 1), (8.3, 1, 1), (8.5, 1, 2), (16, 1, 2), (17, 1, 3), (80, 1, 10),
     (0, 5, 1), (8, 5, 1), (8.3, 5, 2), (8.3, 2, 2), (16.1, 3, 3)],
)  # fmt: skip
def test_wanted_is_the_fewest_that_carry_the_load_with_a_band_in_which_nothing_changes(
    load: float, current: int, replicas: int
) -> None:
    assert wanted(load, 8, current) == replicas


def test_a_mean_weighs_by_time_and_knows_its_gaps() -> None:
    readings = (Reading(0, 10, 1.0), Reading(10, 12, 7.0), Reading(20, 30, 1.0, frozenset({"a"})))
    assert mean(readings, 30, 30) == Mean((10 + 14 + 10) / 22, 22 / 30, False)
    assert mean(readings, 12, 12) == Mean(24 / 12, 1.0, True)
    assert mean((), 30, 30) == Mean(0.0, 0.0, False)


def test_counters_give_exact_means_between_two_reads() -> None:
    state = measure(State(), ["a"], {"a": report(concurrency_seconds_total=100.0)}, 0)
    state = measure(state, ["a"], {"a": report(concurrency_seconds_total=130.0)}, 3)
    assert state.readings == (Reading(0, 3, 10.0),)
    state = measure(state, ["a", "b"], {"a": report(concurrency_seconds_total=130.0), "b": report(running=5)}, 6)
    assert state.readings[-1].concurrency == 5.0  # a new pod counts with what it runs now


def test_a_missed_read_is_completed_by_the_next_one() -> None:
    state = measure(State(), ["a"], {"a": report(concurrency_seconds_total=0.0)}, 0)
    state = measure(state, ["a"], {}, 3)
    assert not mean(state.readings, 3, 3).complete
    state = measure(state, ["a"], {"a": report(concurrency_seconds_total=24.0)}, 6)
    assert mean(state.readings, 6, 6) == Mean(4.0, 1.0, True)


def test_a_restarted_engine_counts_from_what_it_runs() -> None:
    state = measure(State(), ["a"], {"a": report(concurrency_seconds_total=500.0)}, 0)
    state = measure(state, ["a"], {"a": report(concurrency_seconds_total=1.0, running=2, waiting=1)}, 3)
    assert state.readings[-1].concurrency == 3.0


def test_a_burst_scales_within_the_panic_window_and_holds() -> None:
    history = run([1.0] * 20 + [40.0] * 3 + [1.0] * 20)
    assert history[20] == 1
    assert max(history[21:25]) >= 2  # within 12 s of the burst
    peak = max(history)
    assert history[-1] == peak  # nothing scales in while panicking, nor before the delay


def test_scale_in_waits_for_the_delay_and_halves_at_most() -> None:
    history = run([60.0] * 30 + [1.0] * 120, replicas=8)
    assert history[30] == 8
    first = next(i for i, n in enumerate(history) if i > 30 and n < 8)
    assert (first - 30) * 3 >= 120
    drops = [(a, b) for a, b in itertools.pairwise(history) if b < a]
    assert all(b >= a // 2 for a, b in drops)
    assert history[-1] == 1


def test_a_new_memory_never_scales_in_before_its_windows_filled() -> None:
    history = run([0.0] * 60, replicas=5)
    first = next(i for i, n in enumerate(history) if n < 5)
    assert first * 3 >= BOUNDS.delay


def test_unknown_capacity_changes_nothing_but_bounds_hold() -> None:
    state = replace(State(), readings=steady(100, 0, 60))
    unknown = replace(BOUNDS, target=None)
    assert decide(unknown, state, 3, 3, 60)[0].replicas == 3
    assert decide(replace(unknown, max_replicas=2), state, 3, 3, 60)[0].replicas == 2
    assert decide(replace(unknown, min_replicas=4), state, 3, 3, 60)[0].replicas == 4


def test_what_limits_is_said() -> None:
    state = replace(State(), readings=steady(200, 0, 60))
    scale, _ = decide(BOUNDS, state, 10, 10, 60)
    assert scale.limited == "the load wants 24 replicas and maxReplicas is 10"
    blind = replace(State(), readings=(Reading(0, 60, 0.0, frozenset({"a"})),))
    scale, _ = decide(BOUNDS, blind, 3, 3, 60)
    assert scale.limited == "nothing scales in while the load is not known for a whole window"


loads = st.floats(0, 100, allow_nan=False)


@given(load=loads, start=st.integers(1, 10), noise=st.lists(st.floats(-0.01, 0.01), min_size=150, max_size=150))
@settings(max_examples=40, deadline=None)
def test_no_flapping_at_constant_load(load: float, start: int, noise: list[float]) -> None:
    history = run([load * (1 + n) for n in noise], replicas=start)
    moves = [b - a for a, b in itertools.pairwise(history) if a != b]
    turns = sum((a > 0) != (b > 0) for a, b in itertools.pairwise(moves))
    assert turns == 0
    assert len(moves) <= 5


@given(before=loads, after=st.lists(st.one_of(st.none(), loads), min_size=1, max_size=100))
@settings(max_examples=60, deadline=None)
def test_nothing_scales_in_while_any_of_the_window_is_unknown(before: float, after: list[float | None]) -> None:
    masked = [None if i % 20 == 0 else load for i, load in enumerate(after)]  # no window is ever whole
    history = run([*[before] * 10, *masked], replicas=4)
    assert all(b >= a for a, b in itertools.pairwise(history))


@given(first=loads, second=loads, current=st.integers(1, 10), ready=st.integers(0, 10))
def test_monotone_in_load(first: float, second: float, current: int, ready: int) -> None:
    low, high = sorted((first, second))
    states = [replace(State(), readings=steady(load, 0, 60), since=-1000.0) for load in (low, high)]
    replicas = [decide(BOUNDS, state, current, ready, 60)[0].replicas for state in states]
    assert replicas[0] <= replicas[1]


@given(load=st.floats(2.0, 8.0), replicas=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_tenfold_step_is_answered_within_two_looks(load: float, replicas: int) -> None:
    history = run([load * replicas] * 20 + [10 * load * replicas] * 2, replicas=replicas)
    assert history[-1] > replicas


@given(history=st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=1, max_size=60), start=st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_steps_and_bounds_hold_whatever_the_load(history: list[float | None], start: int) -> None:
    replicas = run(history, replicas=start)
    for a, b in itertools.pairwise(replicas):
        assert 1 <= b <= 10
        assert max(1, a // 2) <= b <= 2 * a
