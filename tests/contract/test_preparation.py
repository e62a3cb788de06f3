"""What has to be recorded first waits until waiting has cost as much."""

from pilotfish_engine.contract.preparation import Preparation, ready
from pilotfish_engine.contract.speculation import PLAIN, Settings

K1, K3 = (Settings(num_steps=k, topk=1, num_draft_tokens=k + 1) for k in (1, 3))
RATES = {PLAIN: 100.0, K1: 150.0, K3: 200.0}
OPTIONS = (PLAIN, K1, K3)


def settled(subject: Preparation, prices: dict[Settings, float], runs: Settings, ran_ms: float = 0.0) -> Settings:
    return subject.settle(K3, runs, OPTIONS, RATES.__getitem__, lambda s: prices.get(s, 0.0), ran_ms)


def test_what_is_ready_runs_at_once() -> None:
    subject = Preparation(0.01)
    assert subject.settle(K3, PLAIN, OPTIONS, RATES.__getitem__, ready, 0.0) == K3


def test_the_best_that_is_ready_runs_meanwhile() -> None:
    assert settled(Preparation(0.01), {K3: 50.0}, PLAIN) == K1
    assert settled(Preparation(0.01), {K3: 50.0, K1: 50.0}, PLAIN) == PLAIN


def test_where_nothing_is_ready_the_best_is_prepared() -> None:
    assert settled(Preparation(0.01), dict.fromkeys(OPTIONS, 50.0), PLAIN) == K3


def test_it_is_prepared_when_waiting_has_cost_its_price() -> None:
    """A quarter of the time is lost with K1 in place of K3."""
    subject, waited = Preparation(0.01), 0.0
    while settled(subject, {K3: 50.0}, K1, 20.0) == K1:
        waited += 20.0
    assert waited == 180.0
    assert settled(subject, {K3: 50.0}, K1, 20.0) == K1  # the next one waits anew
