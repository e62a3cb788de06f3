"""A minute of the soak: every registered method with each of its drafts once, by a fixed seed."""

from __future__ import annotations

import pytest

from tests.engine.conformance.conftest import variants
from tests.engine.soak.soak import Soak

SEED, REQUESTS = 20, 24


@pytest.fixture(scope="module")
def soaking(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    return Soak(tmp_path_factory.mktemp("soak"), SEED)


@pytest.mark.parametrize("number", range(1 + len(variants())))
def test_every_answer_is_the_one_that_its_request_has_alone(soaking, number):
    soaking.round(number, REQUESTS)
    sums = soaking.sums
    assert sums.answers + sums.aborts == REQUESTS * sums.rounds


def test_requests_were_aborted_and_retracted(soaking):
    sums = soaking.sums
    assert min(sums.aborts, sums.retractions) >= sums.rounds // 2
