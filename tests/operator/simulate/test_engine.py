"""Simulated engines: what is known by arithmetic comes out, whatever the load; and nothing is lost or made up."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.goodput import Acceptance, candidates, expected_yield, plain_rate
from pilotfish_engine.contract.speculation import PLAIN, Envelope, Settings
from pilotfish_operator.simulate import machine
from pilotfish_operator.simulate.choosers import Chooser, Static
from pilotfish_operator.simulate.command import find
from pilotfish_operator.simulate.engine import Engine, curve
from pilotfish_operator.simulate.load import CHAT, CODE, LOADS, Arrival, Kind, arrivals, recorded
from pilotfish_operator.simulate.study import Traffic, steady

H200, PUBLISHED = find("h200-8b"), find("published-8gpu")
CHAINS = Envelope(num_steps=5, topk=1, num_draft_tokens=6)


def lived(chooser: Chooser, coarse: int, seconds: float = 60.0, **changes: int) -> Engine:
    engine = Engine(H200.model_copy(update=changes), chooser, 3, coarse=coarse)
    engine.inbox.extend(arrivals(LOADS["mixed"](12.0), 5))
    engine.run(seconds)
    engine.inbox.clear()
    while engine.running or engine.waiting:
        engine.run(engine.now + 10)
    return engine


@pytest.mark.parametrize("coarse", [1, 64])
def test_every_request_is_answered_once_with_all_its_tokens(coarse: int) -> None:
    engine = lived(Controller(CHAINS, H200.profile, 256), coarse)
    came = [a for a in arrivals(LOADS["mixed"](12.0), 5) if a.at < 60]
    assert len(engine.answers) >= len(came) > 100
    assert engine.counts.tokens == pytest.approx(sum(a.arrival.output for a in engine.answers))
    assert engine.context_tokens == pytest.approx(0, abs=1)
    assert all(a.arrival.at <= a.admitted_at < a.first_at <= a.ended_at for a in engine.answers)


def test_the_integral_of_concurrency_is_the_time_that_requests_were_there() -> None:
    """Little's law; a request counts from the step after it came, as in an engine."""
    engine = lived(Controller(CHAINS, H200.profile, 256), 1)
    there = sum(answer.ended_at - answer.arrival.at for answer in engine.answers)
    assert engine.counts.concurrency_seconds == pytest.approx(there, rel=0.03)


def test_many_steps_at_once_give_what_single_steps_give() -> None:
    exact, coarse = (lived(Controller(CHAINS, H200.profile, 256), grain) for grain in (1, 64))
    for part in ("first_at", "ended_at"):
        means = [
            sum(getattr(a, part) - a.arrival.at for a in engine.answers) / len(engine.answers)
            for engine in (exact, coarse)
        ]
        assert means[1] == pytest.approx(means[0], rel=0.05)


@pytest.mark.parametrize(("changes", "most"), [({"max_running_requests": 4}, 4), ({"kv_tokens": 4000}, 10)])
def test_no_more_run_than_have_room(changes: dict[str, int], most: int) -> None:
    engine = Engine(H200.model_copy(update=changes), Static(PLAIN), 1)
    kind = Kind("one", 200, 200, CHAT.acceptance)
    engine.inbox.extend(Arrival(0.0, 200, 200, kind) for _ in range(40))
    seen = 0
    while engine.inbox or engine.running or engine.waiting:
        engine.run(engine.now + 0.05)
        seen = max(seen, engine.running)
    assert seen == most
    assert len(engine.answers) == 40


def test_a_request_larger_than_the_room_runs_alone() -> None:
    engine = Engine(H200.model_copy(update={"kv_tokens": 100}), Static(PLAIN), 1)
    engine.inbox.extend(Arrival(0.0, 200, 200, CHAT) for _ in range(3))
    engine.run(60)
    assert len(engine.answers) == 3


@pytest.mark.parametrize("users", [1, 2, 4, 8, 16, 32])
def test_the_published_machine_gives_the_published_figures(users: int) -> None:
    """Plain 773 tok/s at saturation and EAGLE-3 354; 1.04 times plain at one user; and the better of both by choice."""
    k3 = Settings(num_steps=3, topk=1, num_draft_tokens=4)
    point = steady(
        PUBLISHED, Envelope(num_steps=3, topk=1, num_draft_tokens=4), users, Traffic(0.544, prompt=1), 60.0, 1
    )
    plain = plain_rate(PUBLISHED.profile, users, 0)
    assert point.rates["plain"] == pytest.approx(plain, rel=0.1)  # prompts take their part
    if users == 1:
        gain = point.rates["K3"] / point.rates["plain"]
        assert gain == pytest.approx(1.04, abs=0.02)
    if users == 32:
        assert plain == pytest.approx(773, rel=0.01)
        yielded = 1 + expected_yield(Acceptance((0.544, 0.544**2, 0.544**3)), k3)
        assert 1000 * users * yielded / 181 == pytest.approx(354, rel=0.02)
        assert point.rates["K3"] < 0.6 * point.rates["plain"]
    assert point.of_best_static >= 0.98


@pytest.mark.parametrize(("users", "accepted"), [(1, 0.6), (16, 0.3), (64, 0.8), (256, 0.6)])
def test_the_better_of_plain_and_every_static_setting_at_steady_points(users: int, accepted: float) -> None:
    point = steady(H200, CHAINS, users, Traffic(accepted), 5.0, 1)
    assert point.of_best_static >= 0.98
    assert point.rates["oracle"] >= 0.975 * point.best_static  # the best of each step is not always that of many


@given(st.sampled_from(candidates(Envelope(num_steps=5, topk=4, num_draft_tokens=16))), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_accepted_lengths_have_the_mean_that_decisions_expect(settings_: Settings, accepted: float) -> None:
    acceptance = Acceptance(tuple(accepted**depth for depth in range(1, 9)))
    lengths, weights = curve(acceptance, settings_)
    mean = sum(length * weight for length, weight in zip(lengths, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(1 + expected_yield(acceptance, settings_), rel=0.02, abs=0.01)


def test_dice_are_seeded() -> None:
    runs = [lived(Controller(CHAINS, H200.profile, 256), 64, 20.0).answers for _ in range(2)]
    assert runs[0] == runs[1]
    assert list(arrivals(LOADS["day"](0.1), 1)) != list(arrivals(LOADS["day"](0.1), 2))


def test_a_load_has_the_rate_that_it_says() -> None:
    day = LOADS["day"](2.0)
    came = list(arrivals(day, 7))
    expected = sum((phase.start + phase.end) / 2 * phase.seconds for phase in day.phases)
    assert len(came) == pytest.approx(expected, rel=0.02)
    assert sum(a.kind is CODE for a in came) == pytest.approx(0.3 * len(came), rel=0.05)
    assert [a.at for a in came] == sorted(a.at for a in came)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"verify_ms": []}, "verify_ms is empty"),
        ({"verify_ms": [[1, -2.0]]}, "profile.verify_ms"),
        ({"verify_ms": [[1, 1e9]]}, "profile.verify_ms"),
        ({"verify_ms": [[1, 0.0]]}, r"verify_ms has \(1, 0\)"),
        ({"draft_ms": [[0, 1.0]]}, "profile.draft_ms"),
        ({"kv_ms_per_token": 1e9}, "profile.kv_ms_per_token"),
        ({"verify_ms": [[1, "much"]]}, "profile.verify_ms"),
    ],
)
def test_an_impossible_machine_is_named(bad: dict[str, object], says: str) -> None:
    data = H200.model_dump(mode="json")
    data["profile"] |= bad
    with pytest.raises(machine.MachineError, match=says):
        machine.read(json.dumps(data), "mine.json")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"at": 2, "prompt": 1, "output": 1}', '{"at": 1, "prompt": 1, "output": 1}'], "line 2: at 1.0 is before"),
        (['{"at": NaN, "prompt": 1, "output": 1}'], "line 1: at nan"),
        (['{"at": 0, "prompt": 0, "output": 1}'], "line 1"),
        (["{}"], "line 1 is no request"),
    ],
)
def test_a_recorded_load_that_cannot_be_is_named(lines: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        recorded(lines, CHAT)


def test_recorded_requests_come_when_they_came() -> None:
    dice = random.Random(1)
    lines = [f'{{"at": {n}, "prompt": {dice.randint(1, 9)}, "output": 5, "version": 2}}' for n in range(5)]
    assert [a.at for a in recorded(lines, CHAT)] == [0, 1, 2, 3, 4]
