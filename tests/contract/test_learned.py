"""What one engine has measured serves another of its kind, and nobody else; and what it reports is what came."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pilotfish_engine.contract.best import Best
from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.goodput import candidates
from pilotfish_engine.contract.speculation import PLAIN, Envelope, Finding, Learned
from pilotfish_engine.contract.times import MeasuredCosts
from tests.contract.synthetic import CPU_NGRAM, H200, rate, simulate, traffic

CHAINS = Envelope(num_steps=5, topk=1, num_draft_tokens=6)
WRONG = CPU_NGRAM.model_copy(update={"overhead_ms": 12.0})  # four times what speculative steps really cost beside
TRUE = CPU_NGRAM.model_copy(update={"overhead_ms": 4.0})


def experienced(key: str = "a") -> Controller:
    subject = Controller(CHAINS, WRONG, 256, key)
    simulate(subject, TRUE, lambda _: traffic(2.0), 4, 3000)
    return subject


def test_an_engine_that_is_told_predicts_as_the_one_that_measured() -> None:
    learned = experienced().learned
    old, new = MeasuredCosts(learned.profile, learned.places), Best(WRONG, 256, "a")
    assert new.learn(Learned.model_validate_json(learned.model_dump_json())) is None
    for settings in (PLAIN, *candidates(CHAINS)):
        for batch in (1, 4, 30):
            expected = old.step_ms(settings, batch, batch * 500)
            assert new.step_ms(settings, batch, batch * 500) == pytest.approx(expected)


def test_a_told_engine_loses_less_at_first() -> None:
    told, alone = Controller(CHAINS, WRONG, 256, "a"), Controller(CHAINS, WRONG, 256, "a")
    told.learn(experienced().learned)
    first = [rate(simulate(one, TRUE, lambda _: traffic(2.0), 4, 150, seed=5)) for one in (told, alone)]
    assert first[0] >= 0.99 * first[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"key": "b"}, "it is of 'b'"), ({"version": 7}, "version 7"), ({"places": ()}, "it knows 0 steps")],
)
def test_what_does_not_fit_is_named_and_not_used(changes: dict[str, object], says: str) -> None:
    subject = Controller(CHAINS, WRONG, 256, "a")
    before = subject.learned
    refused = subject.learn(experienced().learned.model_copy(update=changes))
    assert refused is not None
    assert says in refused
    assert subject.learned == before


@pytest.mark.parametrize(
    ("part", "value"), [("common", float("nan")), ("host_ms", -1.0), ("host_ms", float("inf")), ("bits", 0)]
)
def test_a_record_of_what_cannot_be_is_no_record(part: str, value: float) -> None:
    data = experienced().learned.model_dump()
    data["places"][0][part] = value
    with pytest.raises(ValidationError):
        Learned.model_validate(data)


def test_one_who_knows_more_learns_nothing_from_one_who_knows_less() -> None:
    old = experienced()
    young = Controller(CHAINS, WRONG, 256, "a")
    simulate(young, TRUE, lambda _: traffic(2.0), 4, 10)
    assert old.learn(young.learned) is not None


@pytest.mark.parametrize("batch", [1, 16, 100])
def test_findings_are_what_came_and_what_was_promised_is_near(batch: int) -> None:
    subject = Controller(CHAINS, H200, 256)
    steps = simulate(subject, H200, lambda _: traffic(2.0), batch, 2000 if batch < 100 else 700)
    runs = subject.effective()
    found = next(f for f in subject.findings if f.settings.num_steps == runs.num_steps)
    assert isinstance(found, Finding)
    assert found.running == pytest.approx(batch)
    own = [s for s in steps[-300:] if s.settings == found.settings]
    assert found.tokens_per_second == pytest.approx(rate(own), rel=0.1)
    assert found.promised_tokens_per_second == pytest.approx(found.tokens_per_second, rel=0.12)


def test_findings_are_bounded_and_the_last_to_run_comes_first() -> None:
    subject = Controller(CHAINS, H200, 256)
    for batch in (1, 3, 6, 12, 25, 50, 100, 200):
        simulate(subject, H200, lambda _: traffic(2.0), batch, 40)
    assert len(subject.findings) <= 8
    assert subject.findings[0].running == pytest.approx(200)
