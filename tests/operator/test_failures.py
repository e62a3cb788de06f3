"""What breaks around the operator: its own death, a second one, the API server, the CRD, its credentials."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from pilotfish_operator.kinds import DEPLOYMENTS
from tests.operator.conftest import install_crd
from tests.operator.live import Kubelet, OperatorProcess, Space, eventually

Start = Callable[..., OperatorProcess]
AUTO = {"maxReplicas": 3, "targetConcurrency": 4, "stableWindow": "6s", "scaleDownDelay": "4s"}
LEADING = "pilotfish_operator_leading"
TAKEN = "pilotfish_operator_envelopes_put_total"


def test_of_two_operators_one_acts_and_the_other_keeps_its_decisions(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    first = operator()
    eventually(lambda: first.metric(LEADING) == 1, "the first leads")
    second = operator()
    space.apply("fish", {"autoscaling": AUTO})
    eventually(lambda: kubelet.engines, "a pod")
    (engine,) = kubelet.engines.values()
    engine.load = 8
    eventually(lambda: space.replicas("fish") == 2, "2 replicas", 25)
    eventually(lambda: len(kubelet.engines) == 2 and engine.puts, "all serve")
    held = engine.envelope
    assert second.metric(LEADING) == 0
    eventually(lambda: first.metric(TAKEN) > 0, "it counts what engines took")
    assert second.metric(TAKEN) == 0
    assert "Scaled" not in second.text()
    first.end(signal.SIGKILL)
    eventually(lambda: second.metric(LEADING) == 1, "the second takes over", 30)
    second.after_turns(4)  # its windows are not full yet
    assert space.replicas("fish") == 2
    assert engine.envelope == held
    second.end()
    third = operator()
    eventually(lambda: third.metric(LEADING) == 1, "a Lease that was released is taken at once", 6)
    engine.load = 0
    eventually(lambda: space.replicas("fish") == 1, "it works", 30)


def test_the_api_server_may_restart_in_the_middle(space: Space, operator: Start, kubelet: Kubelet) -> None:
    process = operator()
    space.apply("before")
    eventually(lambda: space.condition("before", "Ready")[0] == "True", "serves")
    space.cluster.kill_component("kube-apiserver")
    time.sleep(12)  # longer than the Lease lets it lead
    assert process.healthz() == (200, "ok\n")
    space.cluster.restart_component("kube-apiserver")
    space.apply("after")
    eventually(lambda: space.get(DEPLOYMENTS, "after"), "the watches are back")
    eventually(lambda: space.condition("after", "Ready")[1] == "Starting", "status is written")
    assert space.condition("before", "Ready")[0] == "True"
    assert process.process.poll() is None
    assert "Traceback" not in process.text()
    assert process.healthz() == (200, "ok\n")


def test_before_after_and_without_the_crd(space: Space, operator: Start, kubelet: Kubelet) -> None:
    space.cluster.kubectl("delete", "crd", "speculativemodels.pilotfish.dev", "--timeout=30s")
    try:
        process = operator()
        eventually(lambda: "is not installed: waiting for it" in process.text(), "it says what it waits for")
        time.sleep(4)
        assert process.healthz() == (200, "ok\n")
        assert process.text().count("is not installed") == 1
        install_crd(space.cluster)
        space.apply("fish")
        eventually(lambda: space.condition("fish", "Ready")[0] == "True", "reconciles once the CRD is there", 30)
        space.cluster.kubectl("delete", "crd", "speculativemodels.pilotfish.dev", "--timeout=30s")
        space.kubectl(
            "delete", "deployment", "fish", "--ignore-not-found"
        )  # collected in the end, but the collector learns of kinds slowly
        time.sleep(4)
        assert not space.get(DEPLOYMENTS, "fish")
        assert process.healthz() == (200, "ok\n")
        install_crd(space.cluster)
        space.apply("again")
        eventually(lambda: space.condition("again", "Ready")[0] == "True", "and again", 60)
        assert "Traceback" not in process.text()
    finally:
        install_crd(space.cluster)


def test_a_rotated_token_is_read_again(space: Space, operator: Start, kubelet: Kubelet, tmp_path: Path) -> None:
    process = operator()
    space.apply("before")
    eventually(lambda: space.condition("before", "Ready")[0] == "True", "serves")
    space.kubectl("delete", "serviceaccount", "operator")  # its tokens die with it
    space.apply("after")
    eventually(lambda: "Unauthorized" in process.text(), "the old token is refused", 30)
    space.account(tmp_path / "account")
    eventually(lambda: space.condition("after", "Ready")[0] == "True", "the new token is used", 60)
    assert process.process.poll() is None


def test_missing_rights_are_said_and_what_is_unseen_is_not_taken_for_absent(space: Space, operator: Start) -> None:
    first = operator()
    first.end()
    rules = space.api.get(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}/roles/operator") or {}
    kept = [rule for rule in rules["rules"] if rule["resources"] != ["pods"]]
    space.patch("role", "operator", {"rules": kept})
    process = operator()
    eventually(lambda: "cannot list pods" in process.text() and "forbidden" in process.text(), "it says what it lacks")
    space.apply("fish")
    process.after_turns(3)
    assert not space.all(DEPLOYMENTS)
    assert process.healthz()[0] == 200
