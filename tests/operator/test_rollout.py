"""What is final, what comes back: refusals, rollouts that do not become ready, templates and what names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pilotfish_operator import objects, status
from pilotfish_operator.api import Spec
from pilotfish_operator.kinds import BY_NAME, CONFIG_MAPS, DEPLOYMENTS, PODS, SECRETS, TEMPLATE_LABEL
from pilotfish_operator.objects import Object, Owner
from pilotfish_operator.observe import Observed, observe
from pilotfish_operator.plan import Memory, Patience, Plan, decide, plan
from tests.operator.live import Kubelet, OperatorProcess, Space, eventually

Start = Callable[..., OperatorProcess]
OWNER = Owner("ns", "fish", "uid-1")
PATIENCE = Patience(again=100.0, rollout=200.0)


def spec(page_size: int = 16, accelerator: str = "nvidia.com/gpu", **more: Any) -> Spec:
    return Spec.model_validate({
        "model": {"source": "hf://a/b"}, "engine": {"pageSize": page_size}, "resources": {"accelerator": accelerator},
    } | more)  # fmt: skip


def pod(name: str, of: Spec, state: Object, ready: bool = False, restarts: int = 0, **meta: Any) -> Object:
    labels = {TEMPLATE_LABEL: objects.template_hash(OWNER, of)}
    container = {"name": "engine", "restartCount": restarts, "state": state}
    return {
        "metadata": {"name": name, "uid": name, "labels": labels, "creationTimestamp": "1970-01-01T00:00:00Z"} | meta,
        "status": {
            "podIP": "127.9.9.9", "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [container],
        },
    }  # fmt: skip


def exited(code: int) -> Object:
    return {"terminated": {"exitCode": code, "message": f"words of {code}"}}


RUNNING: Object = {"running": {}}


class World:
    """A cluster of one model, whose API server is a dictionary: what the plan makes is there afterwards."""

    def __init__(self) -> None:
        self.children: dict[Any, Object] = {(SECRETS, "fish-admin"): {"data": {"token": "eA=="}}}

    def turn(self, of: Spec, *pods: Object, now: float = 0.0, image: str = "image:1") -> Plan:
        seen = self.seen(*pods)
        decision, _ = decide(of, seen, Memory(), now)
        made = plan(OWNER, of, seen, decision, image, now, PATIENCE)
        self.children |= {(BY_NAME[o["kind"]], o["metadata"]["name"]): o for o in made.objects}
        for name in made.prune:
            del self.children[CONFIG_MAPS, name]
        return made

    def seen(self, *pods: Object) -> Observed:
        return observe(OWNER, self.children | {(PODS, p["metadata"]["name"]): p for p in pods})

    def served(self, of: Spec) -> World:
        self.turn(of)
        self.turn(of, pod("old", of, RUNNING, ready=True))
        return self

    @property
    def template(self) -> Object:
        found: Object = self.children[DEPLOYMENTS, "fish"]["spec"]["template"]
        return found

    def degraded(self, made: Plan, of: Spec, *pods: Object) -> tuple[str, str, str]:
        found = status.compose(
            OWNER, of, self.seen(*pods), made, status.Trouble(), status.Last({}, 1, "2026-01-01T00:00:00Z")
        )
        return next((c["status"], c["reason"], c["message"]) for c in found["conditions"] if c["type"] == "Degraded")


@pytest.mark.parametrize("code", [1, 2, 75, 137])
def test_a_template_that_has_served_is_never_refused(code: int) -> None:
    world, of = World().served(spec()), spec()
    for restarts in (0, 1, 5, 50):
        made = world.turn(of, pod("a", of, exited(code), restarts=restarts), now=9e5)
        assert (made.replicas, made.blocked) == (1, None)


@pytest.mark.parametrize(("code", "replicas"), [(1, 1), (2, 0), (75, 1), (137, 1)])
def test_only_what_can_never_work_ends_a_model_that_never_served(code: int, replicas: int) -> None:
    world, of = World(), spec()
    world.turn(of)
    made = world.turn(of, dead := pod("a", of, exited(code), restarts=9), now=9e5)
    assert made.replicas == replicas
    truth, _, message = world.degraded(made, of, dead)
    assert truth == "True"
    assert f"words of {code}" in message
    assert ("not there yet" in message) == (code == 75)


def test_a_refused_model_is_tried_again_ever_more_seldom() -> None:
    world, of, now = World(), spec(), 1000.0
    world.turn(of)
    waits = []
    for _ in range(9):
        refused = world.turn(of, pod("a", of, exited(2)), now=now)
        assert refused.replicas == 0
        assert refused.verdict is not None
        assert refused.verdict.until is not None
        assert "tried again at" in world.degraded(refused, of)[2]
        waits.append(refused.verdict.until - now)
        assert world.turn(of, now=refused.verdict.until - 1).replicas == 0
        now = refused.verdict.until
        again = world.turn(of, now=now)
        assert again.replicas == 1
        truth, reason, message = world.degraded(again, of)
        assert (truth, reason) == ("True", "EngineRefused")
        assert "is under way" in message
    assert waits == [100.0 * 2.0 ** min(i, 6) for i in range(9)]
    world.turn(of, serving := pod("a", of, RUNNING, ready=True), now=now)
    assert world.degraded(world.turn(of, serving, now=now), of, serving)[0] == "False"


NEW = spec(page_size=32)


@pytest.mark.parametrize(
    ("failing", "now", "reason"),
    [
        (pod("b", NEW, exited(1), restarts=2), 1.0, "RolloutFailed"),
        (pod("b", NEW, exited(139), restarts=7), 1.0, "RolloutFailed"),
        (pod("b", NEW, exited(75), restarts=2), 1.0, "RolloutFailed"),
        (pod("b", NEW, {"waiting": {"reason": "ImagePullBackOff", "message": "none"}}), 201.0, "RolloutFailed"),
        (pod("b", NEW, {"waiting": {"reason": "CreateContainerConfigError"}}), 201.0, "RolloutFailed"),
        (pod("b", NEW, exited(2)), 1.0, "EngineRefused"),
    ],
)
def test_a_rollout_that_does_not_become_ready_goes_back_until_the_spec_changes(
    failing: Object, now: float, reason: str
) -> None:
    world, old = World().served(spec()), spec()
    before = world.template
    world.turn(NEW)
    assert world.template != before
    back = world.turn(NEW, failing, now=now)
    assert world.template == before
    assert back.replicas == 1
    for later in (now + 10, now + 1e6):
        back = world.turn(NEW, serving := pod("c", old, RUNNING, ready=True), now=later)
        assert world.template == before
        truth, said, message = world.degraded(back, NEW, serving)
        assert (truth, said) == ("True", reason)
        assert "until the spec changes" in message
    other = spec(page_size=64)
    assert world.turn(other, pod("c", old, RUNNING, ready=True)).blocked is None
    assert world.template["metadata"]["labels"][TEMPLATE_LABEL] == objects.template_hash(OWNER, other)


@pytest.mark.parametrize(
    ("failing", "now"),
    [
        (pod("b", NEW, exited(1), restarts=1), 1.0),
        (pod("b", NEW, {"waiting": {"reason": "ImagePullBackOff"}}), 199.0),
        (pod("b", NEW, RUNNING), 3000.0),  # it loads
        (pod("b", NEW, exited(1), restarts=5, deletionTimestamp="1970-01-01T00:00:00Z"), 1.0),
    ],
)
def test_a_rollout_that_may_still_become_ready_goes_on(failing: Object, now: float) -> None:
    world = World().served(spec())
    world.turn(NEW)
    after = world.template
    assert world.turn(NEW, failing, now=now).blocked is None
    assert world.template == after


def test_a_new_pod_that_waits_for_the_room_of_one_that_drains_is_not_given_up() -> None:
    world = World().served(spec())
    world.turn(NEW)
    waits = pod("b", NEW, {})
    waits["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no GPU"}]}
    drains = pod("a", spec(), RUNNING, deletionTimestamp="1970-01-01T00:00:00Z")
    assert world.turn(NEW, waits, drains, now=500.0).blocked is None
    assert world.turn(NEW, waits, now=500.0).blocked is not None


def test_a_spec_reverted_in_mid_rollout_keeps_the_pods_that_serve_after_an_upgrade_too() -> None:
    world = World().served(spec())
    before = world.template
    serving = pod("old", spec(), RUNNING, ready=True)
    world.turn(NEW, serving, image="image:2")
    assert world.template["spec"]["containers"][0]["image"] == "image:2"
    world.turn(spec(), serving, image="image:2")
    assert world.template == before


def test_templates_that_nothing_has_are_dropped_and_none_stands_in_an_annotation() -> None:
    world = World().served(spec())
    for size in (1, 2, 4, 8):
        made = world.turn(of := spec(page_size=size), pod("a", spec(page_size=size), RUNNING, ready=True))
        world.turn(of, pod("a", of, RUNNING, ready=True))
        assert made.replicas == 1
    kept = [name for kind, name in world.children if kind is CONFIG_MAPS and name != "fish-engine"]
    assert len(kept) == 1
    annotations = world.children[DEPLOYMENTS, "fish"]["metadata"]["annotations"]
    assert sum(map(len, annotations.values())) < 500


@pytest.mark.parametrize("verdict", ["", "null", "[]", "{", '{"hash": 1}', '{"hash":"a","until":"x"}'])
def test_an_annotation_that_somebody_spoilt_is_no_verdict(verdict: str) -> None:
    world = World().served(spec())
    world.children[DEPLOYMENTS, "fish"]["metadata"]["annotations"]["pilotfish.dev/verdict"] = verdict
    assert world.turn(NEW).blocked is None


@pytest.mark.parametrize(("first", "then"), [(1, 4), (4, 1)])
def test_what_cannot_change_in_a_claim_stays_as_it_was_made(first: int, then: int) -> None:
    cache = {"size": "1Gi", "storageClassName": "fast"}
    world = World()
    world.turn(spec(replicas=first, cache=cache))
    made = world.turn(spec(replicas=then, cache=cache | {"storageClassName": "slow"}))
    (claim,) = [o for o in made.objects if o["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == (["ReadWriteMany"] if first > 1 else ["ReadWriteOnce"])
    assert claim["spec"]["storageClassName"] == "fast"


def condition(space: Space, kind: str, reason: str) -> str:
    return eventually(lambda: (c := space.condition("fish", kind))[1] == reason and c[2], f"{kind} {reason}", 30)


def test_on_a_cluster_a_serving_model_outlives_a_hub_that_is_away(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    operator("--retry-refused", "2s")
    space.apply("fish", {"replicas": 2})
    eventually(lambda: space.status("fish").get("readyReplicas") == 2, "serves")
    for code in (75, 2):
        for each in space.all(PODS):
            kubelet.patch_status(each["metadata"]["name"], {
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [{
                    "name": "engine", "ready": False, "restartCount": 4, "image": "x", "imageID": "x",
                    "state": {"terminated": {"exitCode": code, "reason": "Error", "message": "the hub answers 503"}},
                }],
            })  # fmt: skip
        assert "the hub answers 503" in condition(space, "Degraded", "PodFailing")
        eventually(lambda: space.condition("fish", "Ready")[0] == "False", "it is said of both pods")
        assert space.replicas("fish") == 2


def test_on_a_cluster_a_broken_rollout_goes_back_and_on_when_the_spec_changes(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    operator("--rollout-patience", "2s")
    space.apply("fish")
    condition(space, "Ready", "Serving")
    old = space.get(DEPLOYMENTS, "fish")["spec"]["template"]["metadata"]["labels"][TEMPLATE_LABEL]
    kubelet.exits = lambda each: None if each["metadata"]["labels"][TEMPLATE_LABEL] == old else (1, "it broke")
    space.apply("fish", {"engine": {"pageSize": 32}})
    assert "it broke" in condition(space, "Degraded", "RolloutFailed")

    def template() -> str:
        found: str = space.get(DEPLOYMENTS, "fish")["spec"]["template"]["metadata"]["labels"][TEMPLATE_LABEL]
        return found

    eventually(lambda: template() == old, "the former template is back")
    kubelet.exits = lambda each: None
    space.apply("fish", {"engine": {"pageSize": 64}})
    condition(space, "Ready", "Serving")
    condition(space, "Degraded", "AsExpected")
    assert template() != old
    assert len([c for c in space.all(CONFIG_MAPS) if TEMPLATE_LABEL in c["metadata"].get("labels", {})]) <= 2


def test_on_a_cluster_a_claim_made_for_one_replica_is_no_obstacle_and_is_said(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    operator()
    space.apply("fish", {"cache": {"size": "1Gi"}, "replicas": 1})
    condition(space, "Ready", "Serving")
    space.kubectl("scale", "speculativemodel/fish", "--replicas=2")
    assert "ReadWriteOnce" in condition(space, "ModelCached", "ClaimNotShared")
    eventually(lambda: space.status("fish").get("readyReplicas") == 2, "both serve")
    assert space.condition("fish", "Degraded")[0] == "False"
