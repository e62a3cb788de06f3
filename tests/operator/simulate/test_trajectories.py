"""What engines and operator do together as a load comes and goes, seen over time: speculation first, then replicas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import pytest

from pilotfish_operator.api import Spec
from pilotfish_operator.simulate.cluster import PERIOD, Moment, Outcome, Trouble
from pilotfish_operator.simulate.command import find
from pilotfish_operator.simulate.figures import Promise, figures
from pilotfish_operator.simulate.load import CHAT, CODE, LOADS, POOR, Kind, Load, Phase, arrivals
from pilotfish_operator.simulate.study import Study

H200 = find("h200-8b").model_copy(update={"max_running_requests": 64})


def lived(
    slo: float | None, phases: Sequence[tuple[float, float, Kind]], troubles: tuple[Trouble, ...] = ()
) -> Outcome:
    """phases: seconds, requests a second, of a kind."""
    spec = Spec.model_validate(
        {
            "model": {"source": "file:///simulated"},
            "autoscaling": {"minReplicas": 1, "maxReplicas": 4, "scaleDownDelay": "120s"},
            **({"slo": {"tokensPerSecondPerUser": slo}} if slo else {}),
        }
    )
    load = Load("tested", tuple(Phase(s, ((kind, 1.0),), rate, rate) for s, rate, kind in phases))
    study = Study(H200, spec, list(arrivals(load, 3)), load.seconds, Promise(slo), 3, troubles=troubles)
    return study.pilotfish()


@lru_cache(maxsize=1)
def up_and_down() -> Outcome:
    return lived(200, ((120, 4, CHAT), (300, 60, CHAT), (600, 4, CHAT)))


def between(outcome: Outcome, since: float, until: float) -> list[Moment]:
    return [moment for moment in outcome.moments if since < moment.at <= until]


def test_speculation_gives_way_before_replicas_come_and_returns_with_them() -> None:
    outcome = up_and_down()
    calm, alone = between(outcome, 60, 120), [m for m in between(outcome, 130, 420) if m.ready == 1]
    assert min(m.num_steps for m in calm) >= 2
    assert alone
    assert max(m.num_steps for m in alone) == 1  # at once the engines give all to throughput,
    assert all(m.wanted > 1 for m in alone)  # a replica is on its way meanwhile,
    scaled = between(outcome, 300, 420)
    assert sum(m.num_steps for m in scaled) > 1.5 * len(scaled)  # and with it more drafts pay again
    assert outcome.moments[-1].wanted == 1
    assert outcome.moments[-1].num_steps >= 2


def test_what_was_wanted_in_a_burst_brings_no_replicas_after_it() -> None:
    for before, after in itertools.pairwise(between(up_and_down(), 440, 1020)):
        assert after.wanted <= before.wanted


def test_a_tenfold_load_is_answered_within_two_looks() -> None:
    first = next(m for m in up_and_down().moments if m.at > 120 and m.wanted > 1)
    assert first.at <= 120 + 3 * PERIOD  # the load itself begins within a look, and is there a second or two later


def test_no_replica_comes_where_what_is_promised_is_kept_without_it() -> None:
    """Drafts are worth much at this load, and plain decoding would do: one replica stays."""
    outcome = lived(30, ((400, 20, CODE),))
    assert {m.wanted for m in outcome.moments} == {1}
    promise = Promise(30)
    assert sum(promise.kept(answer) for answer in outcome.answers) >= 0.99 * len(outcome.answers)


def test_nothing_scales_in_while_a_pod_s_load_is_not_known() -> None:
    lost = Trouble(at=400.0, kind="lost", seconds=400.0)
    outcome = lived(200, ((120, 4, CHAT), (300, 60, CHAT), (800, 4, CHAT)), (lost,))
    hidden = between(outcome, 403, 800)
    assert hidden[0].wanted > 1
    assert min(m.wanted for m in hidden) >= hidden[0].wanted
    assert all("nothing scales in" in " ".join(m.reasons) for m in hidden[1:])
    assert outcome.moments[-1].wanted < hidden[0].wanted


def test_settings_follow_a_draft_that_turns_bad() -> None:
    outcome = lived(None, ((120, 6, CODE), (120, 6, POOR)))
    before, after = between(outcome, 60, 120), between(outcome, 130, 240)
    assert sum(m.num_steps for m in before) / len(before) >= 3
    assert sum(m.num_steps for m in after) / len(after) <= 1


@pytest.mark.parametrize("rate", [2.0, 15.0])
def test_a_steady_load_changes_bounds_once_a_minute_at_most_and_then_not_at_all(rate: float) -> None:
    outcome = lived(100, ((900, rate, CHAT),))
    envelopes = [m.envelope for m in between(outcome, 300, 900)]
    changes = sum(a != b for a, b in itertools.pairwise(envelopes))
    assert changes <= 10
    assert outcome.changes <= 15
    wanted = [m.wanted for m in between(outcome, 300, 900)]
    assert len(set(wanted)) == 1


@pytest.mark.parametrize("name", ["bursts", "noon"])
def test_nineteen_twentieths_of_an_oracle_over_a_load(name: str) -> None:
    """What a user sees, beside one who knows costs and drafts and has the same replicas."""
    load = LOADS[name](8.0)
    spec = Spec.model_validate({"model": {"source": "file:///simulated"}, "autoscaling": {"maxReplicas": 4}})
    study = Study(H200, spec, list(arrivals(load, 1)), load.seconds, Promise(), 1)
    own = study.pilotfish()
    seen = [figures("", outcome, Promise(), 1) for outcome in (own, study.same_replicas(own, None))]
    assert seen[0].seen_tokens_per_second >= 0.95 * seen[1].seen_tokens_per_second
    assert own.changes <= load.seconds / 60
