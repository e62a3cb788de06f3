"""Finds the slope of a pass with its context under noise, for models that feel it little and much."""

import random

import pytest

from pilotfish_engine.worker.profile import context_slope


@pytest.mark.parametrize(("base_ms", "slope"), [(4.1, 3.3e-5), (25.0, 2.5e-3), (0.6, 1e-6), (4.1, 0.0)])
@pytest.mark.parametrize("seed", range(5))
def test_the_slope_is_found_within_a_tenth(base_ms: float, slope: float, seed: int) -> None:
    dice = random.Random(seed)

    def pass_ms(batch: int, context: int) -> float:
        return (base_ms + slope * batch * context) * (1 + 0.01 * dice.random())

    found = context_slope(pass_ms, max_batch=256, longest=16384)
    assert found == pytest.approx(slope, rel=0.1, abs=0.02 * base_ms / (256 * 16384))


def test_contexts_stay_within_what_there_is() -> None:
    asked: list[tuple[int, int]] = []

    def pass_ms(batch: int, context: int) -> float:
        asked.append((batch, context))
        return 1.0

    assert context_slope(pass_ms, max_batch=3, longest=100) == 0.0
    assert max(asked) == (3, 100)
    assert context_slope(pass_ms, max_batch=3, longest=64) == 0.0


def test_a_pass_that_takes_too_long_is_the_last() -> None:
    calls: list[tuple[int, int]] = []

    def pass_ms(batch: int, context: int) -> float:
        calls.append((batch, context))
        return 400.0 + 1e-4 * batch * context

    context_slope(pass_ms, max_batch=4096, longest=1 << 20)
    assert calls[-1][0] * calls[-1][1] < 16 * 1e6
