"""The operator and the engines: asked at the same load, both say the same, since both ask the same measured steps."""

from __future__ import annotations

import json

import pytest

from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_operator import tune
from pilotfish_operator.scrape.client import BadReport, parse_report
from pilotfish_operator.simulate.cluster import report
from pilotfish_operator.simulate.command import find
from pilotfish_operator.simulate.engine import Engine
from pilotfish_operator.simulate.load import CHAT, POOR, Arrival, Kind

BOUNDS = Envelope(num_steps=5, topk=1, num_draft_tokens=6)
H200 = find("h200-8b")
# at its start the machine seemed twice as slow at verifying as it is, so that nothing seemed to pay
SLOW = H200.profile.model_copy(
    update={"verify_ms": tuple((n, ms * (1 + (n > 16))) for n, ms in H200.profile.verify_ms)}
)


@pytest.mark.parametrize("kind", [CHAT, POOR])
@pytest.mark.parametrize("users", [4, 24])
def test_both_say_what_pays_now(kind: Kind, users: int) -> None:
    machine = H200.model_copy(update={"told": SLOW})
    controller = Controller(BOUNDS, SLOW, 256)
    engine = Engine(machine, controller, 1, coarse=1)
    engine.inbox.extend(Arrival(0.0, 100, 20_000, kind) for _ in range(users))
    differing = since = 0.0
    state = tune.State()
    while engine.now < 30:
        engine.run(engine.now + 1.0)
        seen = tune.traffic([report(engine, BOUNDS)], float(users))
        tuning, state = tune.tune(BOUNDS, seen, [], state, engine.now)
        choice = controller.choice
        assert choice is not None
        if tuning.choice and (tuning.choice.speedup > 1.03) != (choice.speedup > 1.03):
            differing = max(differing, engine.now - since)
        else:
            since = engine.now
    assert differing <= 10
    assert tuning.choice is not None
    assert choice is not None
    assert tuning.choice.tokens_per_second == pytest.approx(choice.tokens_per_second, rel=0.05)
    measured = controller.findings[0].tokens_per_second
    assert choice.tokens_per_second == pytest.approx(measured, rel=0.05)


def test_a_report_of_another_version_s_knowledge_is_not_used() -> None:
    engine = Engine(H200, Controller(BOUNDS, H200.profile, 256), 1)
    engine.inbox.append(Arrival(0.0, 100, 400, CHAT))
    engine.run(1.0)
    said = report(engine, BOUNDS)
    assert said.learned is not None
    other = said.model_copy(update={"learned": said.learned.model_copy(update={"version": 2})})
    seen = tune.traffic([other], 1.0)
    assert seen is not None
    assert seen.profile == H200.profile


@pytest.mark.parametrize("where", ["profile", "learned"])
@pytest.mark.parametrize(("ms", "says"), [(0.0, "a time above 0"), (-1.0, "verify_ms"), (1e12, "verify_ms")])
def test_a_report_with_times_that_cannot_be_is_no_report(where: str, ms: float, says: str) -> None:
    """So it is named in conditions as one that is not believed, and reaches no decision."""
    engine = Engine(H200, Controller(BOUNDS, H200.profile, 256), 1)
    said = report(engine, BOUNDS).model_dump(mode="json")
    (said if where == "profile" else said["learned"])["profile"]["verify_ms"] = [[1, ms]]
    with pytest.raises(BadReport, match=says):
        parse_report("127.0.0.1", json.dumps(said).encode())
