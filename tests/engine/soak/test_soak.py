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


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    return Soak(tmp_path_factory.mktemp("mixed"), SEED, faults=0.35)


@pytest.mark.parametrize("number", [0, 1, 3, 7, 10, 13])
def test_one_request_s_fault_ends_one_request(mixed, number):
    mixed.round(number, REQUESTS)
    assert mixed.sums.faults > REQUESTS * mixed.sums.rounds // 6


def test_requests_were_aborted_and_retracted(soaking):
    sums = soaking.sums
    assert min(sums.aborts, sums.retractions) >= sums.rounds // 2
