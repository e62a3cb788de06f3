"""When to try something else: only what could win, the most for its price first, paid from a share of the time."""

import pytest

from pilotfish_engine.contract.probes import MAX_PROBE_STEPS, PROBE_SHARE, Probes, Prospect
from pilotfish_engine.contract.speculation import PLAIN, Settings

CHAINS = [Settings(num_steps=k, topk=1, num_draft_tokens=k + 1) for k in (1, 3)]
MS = {PLAIN: 10.0, CHAINS[0]: 12.0, CHAINS[1]: 20.0}
RATE = 1 / MS[PLAIN]


def plan(probes: Probes, hope: float, rate: float = RATE) -> None:
    """Drafts are expected to be worth nothing."""
    prospects = []
    for settings in CHAINS:
        best = 1 + sum(hope**depth for depth in range(1, settings.num_steps + 1))
        prospects.append(Prospect(settings, MS[settings], 1 / MS[settings], best / MS[settings]))
    probes.plan(prospects, 1, rate, rate)


def planned(probes: Probes, hope: float, rate: float = RATE) -> Settings | None:
    plan(probes, hope, rate)
    return probes.next(unearned=True)


@pytest.mark.parametrize(("hope", "tried"), [(0.0, None), (0.15, None), (0.3, CHAINS[0]), (1.0, CHAINS[0])])
def test_what_could_win_most_for_its_price_is_tried(hope: float, tried: Settings | None) -> None:
    assert planned(Probes(), hope) == tried


def test_the_dearer_one_is_tried_where_it_alone_could_win() -> None:
    assert planned(Probes(), 1.0, rate=2.1 / MS[CHAINS[0]]) == CHAINS[1]


def test_a_probe_waits_until_it_is_paid_for() -> None:
    probes, steps = Probes(), 0
    plan(probes, 1.0)
    while probes.next(unearned=False) is None:
        probes.earn(MS[PLAIN])
        steps += 1
    price = 4 * (MS[CHAINS[0]] - MS[PLAIN])  # four steps of one request that accept nothing
    assert steps == pytest.approx(price / (PROBE_SHARE * MS[PLAIN]), abs=2)


@pytest.mark.parametrize("lost_ms", [2.0, 7.9, 100.0])
def test_in_the_long_run_probes_lose_their_share_of_the_time_and_no_more(lost_ms: float) -> None:
    probes, ran, lost = Probes(), 0.0, 0.0
    for _ in range(50_000):
        if probes.wants_plan(MS[PLAIN]):
            plan(probes, 1.0)
        if probes.next(unearned=False) is None:
            probes.earn(MS[PLAIN])
            ran += MS[PLAIN]
        else:
            probes.spent(lost_ms)
            lost += lost_ms
    assert 0.3 * PROBE_SHARE <= lost / ran <= 1.1 * PROBE_SHARE


def test_a_probe_that_wins_ends_too_and_the_next_is_earned_anew() -> None:
    probes = Probes()
    assert planned(probes, 1.0) == CHAINS[0]
    steps = 1
    while not probes.spent(-5.0):
        steps += 1
    assert steps == MAX_PROBE_STEPS
    assert probes.next(unearned=False) is None
    assert not probes.wants_plan(MS[PLAIN])


def test_what_runs_changed_so_nothing_is_tried() -> None:
    probes = Probes()
    assert planned(probes, 1.0) is not None
    probes.forget()
    assert probes.next(unearned=True) is None
