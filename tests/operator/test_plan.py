"""Plan and status from observed objects: what runs, what is refused, what is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pilotfish_engine.contract.reason import LONGEST
from pilotfish_operator import objects, observe, status
from pilotfish_operator.api import Spec
from pilotfish_operator.kinds import BY_NAME, PODS, SECRETS
from pilotfish_operator.objects import Object, Owner
from pilotfish_operator.observe import Observed
from pilotfish_operator.plan import Memory, Plan, decide, plan
from pilotfish_operator.scrape.findings import Seen
from tests.operator.engines import report

OWNER = Owner("ns", "fish", "uid-1")
NOW = "2026-11-30T00:00:00Z"


def spec(**parts: Any) -> Spec:
    return Spec.model_validate(
        {"model": {"source": "package://p/m.gguf"}, "resources": {"accelerator": "None"}} | parts
    )


def pod(name: str, of: Spec, *, ready: bool = True, exit: tuple[int, str] | None = None, **more: Any) -> Object:
    state: Object = {"terminated": {"exitCode": exit[0], "message": exit[1]}} if exit else {"running": {}}
    template = objects.template(OWNER, of, "image:1")
    return {
        "metadata": {"name": name, "uid": name, "labels": template["metadata"]["labels"], **more},
        "spec": template["spec"],
        "status": {
            "podIP": "127.9.9.9",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "engine", "restartCount": 0, "state": state}],
        },
    }


def deployed(made: Plan, pods: list[Object]) -> Observed:
    """The cluster after the plan was applied and these pods exist."""
    family = {(BY_NAME[o["kind"]], o["metadata"]["name"]): o for o in made.objects}
    family[SECRETS, "fish-admin"] = {"data": {"token": "eA=="}}
    return observe.observe(OWNER, family | {(PODS, p["metadata"]["name"]): p for p in pods})


def planned(of: Spec, seen: Observed, image: str = "image:1") -> Plan:
    decision, _ = decide(of, seen, Memory(), 0.0)
    return plan(OWNER, of, seen, decision, image)


EMPTY = observe.observe(OWNER, {})


def compose(of: Spec, seen: Observed, made: Plan, old: Mapping[str, Any] | None = None) -> Object:
    return status.compose(OWNER, of, seen, made, status.Trouble(), status.Last(old or {}, 3, NOW))


def conditions(found: Object) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in found["conditions"]}


def deployment(made: Plan) -> Object:
    found: Object = made.objects[-1]
    assert found["kind"] == "Deployment"
    return found


def test_a_new_model_gets_everything_in_order() -> None:
    made = planned(spec(), EMPTY)
    kinds = [manifest["kind"] for manifest in made.objects]
    assert kinds == ["ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget", "ConfigMap", "Deployment"]
    assert made.needs_token
    assert deployment(made)["spec"]["replicas"] == 1


def test_an_operator_upgrade_alone_never_changes_the_pod_template() -> None:
    first = planned(spec(), EMPTY, "image:1")
    second = planned(spec(), deployed(first, [pod("a", spec())]), "image:2")
    assert deployment(second)["spec"]["template"] == deployment(first)["spec"]["template"]
    changed = planned(spec(speculation={"method": "NGRAM"}), deployed(first, [pod("a", spec())]), "image:2")
    assert deployment(changed)["spec"]["template"]["spec"]["containers"][0]["image"] == "image:2"


def test_a_fixed_number_and_a_lost_deployment_keep_replicas() -> None:
    assert planned(spec(replicas=3), EMPTY).replicas == 3
    auto = spec(autoscaling={"maxReplicas": 5})
    assert decide(auto, EMPTY, Memory(), 0.0, former=4)[0].replicas == 4
    assert decide(auto, EMPTY, Memory(), 0.0)[0].replicas == 1


BAD = spec(model={"source": "file:///missing"})


def test_exit_code_2_ends_in_no_pods_and_is_remembered() -> None:
    made = planned(BAD, EMPTY)
    seen = deployed(made, [pod("a", BAD, ready=False, exit=(2, "loading\npilotfish-engine: no such file /missing\n"))])
    refused = planned(BAD, seen)
    assert refused.replicas == 0
    assert refused.blocked == ("EngineRefused", "pilotfish-engine: no such file /missing")
    gone = deployed(refused, [])
    assert planned(BAD, gone).replicas == 0
    found = compose(BAD, gone, planned(BAD, gone))
    assert conditions(found)["Ready"] == ("False", "EngineRefused")
    assert conditions(found)["Degraded"] == ("True", "EngineRefused")
    assert planned(spec(), gone).replicas == 1  # another spec is tried


@pytest.mark.parametrize(("code", "replicas"), [(1, 1), (137, 1), (2, 0)])
def test_only_exit_code_2_is_a_refusal(code: int, replicas: int) -> None:
    seen = deployed(planned(BAD, EMPTY), [pod("a", BAD, ready=False, exit=(code, "words"))])
    made = planned(BAD, seen)
    assert made.replicas == replicas
    message = next(c["message"] for c in compose(BAD, seen, made)["conditions"] if c["type"] == "Degraded")
    assert "words" in message


def test_a_template_that_serves_somewhere_is_not_refused() -> None:
    seen = deployed(planned(BAD, EMPTY), [pod("a", BAD, ready=False, exit=(2, "port busy")), pod("b", BAD)])
    assert planned(BAD, seen).blocked is None


def test_a_refused_change_brings_the_former_template_back() -> None:
    first = planned(spec(), EMPTY)
    second = planned(spec(), deployed(first, [pod("a", spec())]))  # it served
    rolling = planned(BAD, deployed(second, [pod("a", spec())]))
    assert deployment(rolling)["spec"]["template"] != deployment(first)["spec"]["template"]
    seen = deployed(rolling, [pod("a", spec()), pod("b", BAD, ready=False, exit=(2, "no"))])
    back = planned(BAD, seen)
    assert deployment(back)["spec"]["template"] == deployment(first)["spec"]["template"]
    assert back.replicas == 1
    assert conditions(compose(BAD, seen, back))["Ready"] == ("False", "EngineRefused")


def test_a_draft_that_misfits_is_said_as_such() -> None:
    draft = spec(speculation={"method": "STANDALONE", "draft": {"source": "file:///d"}})
    words = "draft file:///d has 10 tokens, the target 49152"
    seen = deployed(planned(draft, EMPTY), [pod("a", draft, ready=False, exit=(2, words))])
    found = compose(draft, seen, planned(draft, seen))
    assert conditions(found)["DraftCompatible"] == ("False", "DraftMisfits")
    assert any(words in c["message"] for c in found["conditions"])


@pytest.mark.parametrize(
    "parts",
    [{"model": {"source": "file:///a", "revision": "main"}}, {"model": {"source": "hf://a/b@c", "revision": "main"}}],
)  # fmt: skip
def test_what_cannot_work_yet_gets_no_objects(parts: dict[str, Any]) -> None:
    made = planned(spec(**parts), EMPTY)
    assert made.objects == ()
    assert made.blocked is not None
    assert made.blocked[0] == "Unsupported"


def serving(count: int, unread: int = 0) -> tuple[Spec, Observed, Plan]:
    of = spec(replicas=count)
    seen = deployed(planned(of, EMPTY), [pod(f"p{i}", of) for i in range(count)])
    reports = {f"p{i}": report() for i in range(count - unread)}
    seen = replace(seen, seen=Seen(reports, {f"p{i}": "timed out" for i in range(count - unread, count)}))
    return of, seen, planned(of, seen)


def test_status_of_a_model_that_serves() -> None:
    of, seen, made = serving(2)
    found = compose(of, seen, made)
    assert {kind: truth for kind, (truth, _) in conditions(found).items()} == {
        "Ready": "True", "Progressing": "False", "Degraded": "False", "MetricsAvailable": "True",
        "DraftCompatible": "True", "SpeculationActive": "True", "ScalingLimited": "False", "ModelCached": "True",
        "SettingsApplied": "True", "Paused": "False",
    }  # fmt: skip
    assert found["readyReplicas"] == 2
    assert found["speculation"]["method"] == "NGRAM"
    assert found["speculation"]["acceptLength"] == 2.0
    assert found["speculation"]["speedup"] > 1
    assert found["speculation"]["effective"]["numSteps"] == 3
    assert found["speculation"]["effective"]["podsInStep"] == "0/2"  # the new envelope is on its way
    assert {pod.name for pod in made.push} == {"p0", "p1"}


@pytest.mark.parametrize("engines", [(True, True), (True, False), (False, False)])
def test_where_the_engines_judge_otherwise_the_reason_says_whose_verdict_is_newer(engines: tuple[bool, ...]) -> None:
    of = spec(replicas=2)
    made = planned(of, EMPTY)
    settings = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4, "disable_threshold": None}
    reports = {
        f"e{n}": report(effective=settings | {"active": active}, reason=f"e{n} has measured")
        for n, active in enumerate(engines)
    }
    seen = replace(deployed(made, [pod(name, of) for name in reports]), seen=Seen(reports))
    made = planned(of, seen)
    assert made.decision.tuning.choice is not None
    pays = made.decision.tuning.choice.settings.num_steps > 0
    speculation = compose(of, seen, made)["speculation"]
    others = [f"e{n}" for n, active in enumerate(engines) if active != pays]
    assert ("Newer" in speculation["reason"]) == bool(others)
    if others:
        do = "decode plainly" if pays else "speculate"
        assert speculation["reason"].endswith(f"Newer: {len(others)} of 2 engines {do} now.")
    assert len(speculation["reason"]) <= LONGEST
    assert speculation["active"] == any(engines)


def test_a_pod_that_cannot_be_read_is_named() -> None:
    of, seen, made = serving(2, unread=1)
    found = compose(of, seen, made)
    message = next(c["message"] for c in found["conditions"] if c["type"] == "MetricsAvailable")
    assert message == "1 of 2 pods cannot be read, so nothing scales in: p1: timed out"


FORBIDDEN = status.Trouble([("Forbidden", "no")])


def test_a_transition_time_moves_with_the_status_alone() -> None:
    of, seen, made = serving(1)
    old = compose(of, seen, made)
    later = status.compose(OWNER, of, seen, made, FORBIDDEN, status.Last(old, 3, "2027-01-01T00:00:00Z"))
    times = {c["type"]: c["lastTransitionTime"] for c in later["conditions"]}
    assert times["Ready"] == NOW
    assert times["Degraded"] == "2027-01-01T00:00:00Z"


def test_events_tell_of_changes_only() -> None:
    of, seen, made = serving(1)
    old = compose(of, seen, made)
    assert status.changes(old, old) == []
    bad = status.compose(OWNER, of, seen, made, FORBIDDEN, status.Last(old, 3, NOW))
    assert [(note.type, note.reason) for note in status.changes(old, bad)] == [("Warning", "Forbidden")]
    assert [(note.type, note.reason) for note in status.changes(bad, old)] == [("Normal", "AsExpected")]
    starting = compose(of, EMPTY, planned(of, EMPTY))
    assert status.changes({}, starting) == []


def test_moving_loads_alone_are_not_material() -> None:
    of, seen, made = serving(1)
    old = compose(of, seen, made)
    new = json.loads(json.dumps(old))
    new["load"] = {"concurrency": 99.0}
    new["speculation"]["reason"] = "other words"
    assert status.material(old) == status.material(new)
    new["readyReplicas"] = 0
    assert status.material(old) != status.material(new)


def test_a_spec_that_cannot_be_read_is_said() -> None:
    found = status.invalid("spec.model: Field required", status.Last({"replicas": 2}, 4, NOW))
    assert found["replicas"] == 2
    assert conditions(found)["Degraded"] == ("True", "InvalidSpec")


@pytest.mark.parametrize(
    ("state", "conditions", "trouble"),
    [
        ({"waiting": {"reason": "ContainerCreating"}}, [], None),
        (
            {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            [],
            "ImagePullBackOff: no such image",
        ),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, [], "exited with code 137: OOMKilled"),
        ({}, [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}], "cannot be scheduled: 0/1 nodes"),
    ],
)
def test_what_keeps_a_pod_from_running(state: Object, conditions: list[Object], trouble: str | None) -> None:
    found = observe.pod({
        "metadata": {"name": "a", "uid": "a"},
        "status": {"conditions": conditions, "containerStatuses": [{"name": "engine", "state": state}]},
    })  # fmt: skip
    assert found.trouble == trouble
