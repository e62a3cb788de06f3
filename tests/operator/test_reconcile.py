"""The operator as a process against a real API server; engines are real HTTP servers, the kubelet is the test."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable

from pilotfish_operator.kinds import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    EVENTS,
    MODELS,
    PODS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
)
from tests.operator.live import Kubelet, OperatorProcess, Space, eventually

Start = Callable[..., OperatorProcess]
AUTO = {"maxReplicas": 3, "targetConcurrency": 4, "stableWindow": "6s", "scaleDownDelay": "4s"}


def test_a_model_gets_its_children_and_an_honest_status(space: Space, operator: Start, kubelet: Kubelet) -> None:
    operator()
    space.apply("fish", {"replicas": 2})
    eventually(lambda: space.condition("fish", "Ready")[0] == "True", "Ready")
    uid = space.get(MODELS, "fish")["metadata"]["uid"]
    for kind, name in (
        (DEPLOYMENTS, "fish"),
        (SERVICES, "fish"),
        (SERVICE_ACCOUNTS, "fish"),
        (SECRETS, "fish-admin"),
        (CONFIG_MAPS, "fish-engine"),
        (DISRUPTION_BUDGETS, "fish"),
    ):
        assert space.get(kind, name)["metadata"]["ownerReferences"][0]["uid"] == uid
    eventually(lambda: space.status("fish")["readyReplicas"] == 2, "two serve")
    eventually(lambda: space.condition("fish", "MetricsAvailable")[0] == "True", "engines are read")
    status = eventually(
        lambda: (s := space.status("fish")).get("speculation", {}).get("acceptLength") and s, "measured"
    )
    assert status["speculation"]["acceptLength"] == 2.0
    assert status["endpoint"] == f"http://fish.{space.name}.svc"
    assert space.condition("fish", "SpeculationActive")[0] == "True"
    assert space.condition("fish", "Degraded")[0] == "False"
    assert "finalizers" not in space.get(MODELS, "fish")["metadata"]
    annotations = space.get(MODELS, "fish")["metadata"].get("annotations", {})
    assert not [key for key in annotations if "kopf" in key]
    line = space.kubectl("get", "spm", "fish").splitlines()[1].split()
    assert line[:6] == ["fish", "True", "2", "NGRAM", "True", "2"]


def test_load_scales_out_and_in_and_the_envelope_follows_without_a_restart(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    operator()
    space.apply("fish", {"autoscaling": AUTO})
    eventually(lambda: len(kubelet.engines) == 1, "a pod")
    (first,) = kubelet.engines.values()
    eventually(lambda: first.puts, "the measured threshold arrives")
    first.load = 8
    eventually(lambda: space.replicas("fish") == 2, "2 replicas for 8 requests at 4 each", 25)
    eventually(lambda: len(kubelet.engines) == 2, "a second pod")
    second = next(engine for engine in kubelet.engines.values() if engine is not first)
    eventually(lambda: second.envelope == first.envelope, "the new pod holds the same envelope")
    desired = space.status("fish")["speculation"]["desired"]
    eventually(lambda: space.status("fish")["speculation"]["effective"]["podsInStep"] == "2/2", "in step")
    assert desired["disableThreshold"] == first.envelope.disable_threshold != "Auto"
    puts = len(second.puts)
    reads = second.reads
    eventually(lambda: second.reads > reads + 3, "it is read on and on")
    assert len(second.puts) == puts  # an envelope is put only where another one is held
    assert any("replicas 1 -> 2" in message for message in space.events("Scaled"))


def test_metrics_cut_off_changes_nothing_and_says_so(space: Space, operator: Start, kubelet: Kubelet) -> None:
    process = operator()
    space.apply("fish", {"autoscaling": AUTO})
    eventually(lambda: kubelet.engines, "a pod")
    (first,) = kubelet.engines.values()
    first.load = 8
    eventually(lambda: space.replicas("fish") == 2, "2 replicas for 8 requests at 4 each", 25)
    eventually(lambda: len(kubelet.engines) == 2 and space.status("fish").get("readyReplicas") == 2, "both serve")
    first.load = 0
    first.cut()
    eventually(lambda: space.condition("fish", "MetricsAvailable")[0] == "False", "the condition")
    desired = space.status("fish")["speculation"]["desired"]
    assert "1 of 2 pods cannot be read" in space.condition("fish", "MetricsAvailable")[2]
    time.sleep(11)  # longer than window and delay together
    assert space.replicas("fish") == 2
    assert space.status("fish")["speculation"]["desired"] == desired
    assert space.condition("fish", "ScalingLimited")[0] == "True"
    assert space.condition("fish", "Ready")[0] == "True"
    first.connect()
    eventually(lambda: space.condition("fish", "MetricsAvailable")[0] == "True", "read again")
    eventually(lambda: space.replicas("fish") == 1, "scales in once the load is known again", 30)
    assert process.healthz() == (200, "ok\n")


def test_what_the_engine_refuses_becomes_a_condition_and_no_crash_loop(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    sentence = "draft file:///d.gguf has 10 tokens and the target 49152; use a draft of the same vocabulary"
    kubelet.exits = lambda pod: (2, f"INFO starting\npilotfish-engine: {sentence}\n")
    process = operator()
    space.apply("fish", {"speculation": {"method": "STANDALONE", "draft": {"source": "file:///d.gguf"}}})
    eventually(lambda: space.replicas("fish") == 0, "no pods run")
    # a pod that waits for its node for a moment may be the reason before this one
    message = eventually(lambda: (c := space.condition("fish", "Degraded"))[1] == "EngineRefused" and c[2], "refused")
    assert sentence in message
    assert "until the spec changes" in message
    assert space.condition("fish", "DraftCompatible")[0] == "False"
    eventually(lambda: not space.all(PODS), "the pod is gone")
    process.after_turns(3)
    assert space.replicas("fish") == 0
    kubelet.exits = lambda pod: None
    space.apply("fish", {"speculation": {"method": "NGRAM"}})
    eventually(lambda: space.condition("fish", "Ready")[0] == "True", "a new spec is tried")
    assert space.condition("fish", "Degraded")[0] == "False"


def test_a_refused_change_leaves_the_former_settings_serving(space: Space, operator: Start, kubelet: Kubelet) -> None:
    operator()
    space.apply("fish")
    eventually(lambda: space.condition("fish", "Ready")[0] == "True", "serves")
    kubelet.exits = lambda pod: (2, "no such file") if "/missing" in str(pod["spec"]) else None
    space.apply("fish", model={"source": "file:///missing"})
    eventually(lambda: space.condition("fish", "Degraded")[1] == "EngineRefused", "refused")
    eventually(lambda: len(space.all(PODS)) == 1, "only the former pod is left")
    assert "/missing" not in str(space.get(DEPLOYMENTS, "fish")["spec"])
    assert space.condition("fish", "Ready") == (
        "False",
        "EngineRefused",
        "no such file; 1 replica with the former settings still there",
    )


def test_a_change_of_the_spec_rolls_and_one_of_tuning_does_not(space: Space, operator: Start, kubelet: Kubelet) -> None:
    operator()
    space.apply("fish")
    eventually(lambda: space.condition("fish", "Ready")[0] == "True", "serves")
    (name,) = kubelet.engines
    (engine,) = kubelet.engines.values()
    space.apply("fish", {"speculation": {"tuning": "Fixed", "disableThreshold": 7}})
    eventually(lambda: engine.envelope.tuning == "Fixed" and engine.envelope.disable_threshold == 7, "put to the pod")
    assert [pod["metadata"]["name"] for pod in space.all(PODS)] == [name]
    space.apply("fish", {"engine": {"maxConcurrency": 9}})
    eventually(lambda: name not in [pod["metadata"]["name"] for pod in space.all(PODS)], "rolled")
    eventually(lambda: space.condition("fish", "Progressing")[0] == "False", "complete")


def test_drift_is_put_right_and_a_second_writer_is_reported(space: Space, operator: Start, kubelet: Kubelet) -> None:
    operator()
    space.apply("fish")
    eventually(lambda: space.condition("fish", "Ready")[0] == "True", "serves")

    def spoil() -> bool:
        space.patch("service", "fish", {"spec": {"selector": {"app.kubernetes.io/name": "spoilt"}}})
        eventually(
            lambda: (
                space.get(SERVICES, "fish")["spec"]["selector"]["app.kubernetes.io/name"] == "pilotfish-engine"
                or space.condition("fish", "Degraded")[1] == "Contested"
            ),
            "put right or reported",
        )
        return space.condition("fish", "Degraded")[1] == "Contested"

    eventually(spoil, "the second writer is reported", 30)
    assert "kubectl" in space.condition("fish", "Degraded")[2]


def test_deletion_collects_and_a_foreign_object_is_left_alone(space: Space, operator: Start, kubelet: Kubelet) -> None:
    process = operator()
    space.kubectl("create", "deployment", "taken", "--image=none")
    space.apply("taken")
    eventually(lambda: space.condition("taken", "Degraded")[1] == "NameTaken", "said")
    assert "ownerReferences" not in space.get(DEPLOYMENTS, "taken")["metadata"]
    space.apply("fish")
    eventually(lambda: space.condition("fish", "Ready")[0] == "True", "serves")
    space.kubectl("delete", "speculativemodel", "fish")
    eventually(lambda: not space.get(DEPLOYMENTS, "fish") and not space.get(SECRETS, "fish-admin"), "collected")
    time.sleep(2)
    assert not space.get(DEPLOYMENTS, "fish")
    assert "ERROR" not in process.text()


def test_scale_subresource_and_zero(space: Space, operator: Start, kubelet: Kubelet) -> None:
    operator()
    space.apply("fish", {"replicas": 1})
    eventually(lambda: space.condition("fish", "Ready")[0] == "True", "serves")
    space.kubectl("scale", "speculativemodel/fish", "--replicas=2")
    eventually(lambda: space.status("fish").get("readyReplicas") == 2, "scaled")
    space.kubectl("scale", "speculativemodel/fish", "--replicas=0")
    eventually(lambda: space.condition("fish", "Ready")[1] == "ScaledToZero", "zero is allowed")
    assert space.replicas("fish") == 0


def test_the_token_is_nowhere_but_in_its_secret(space: Space, operator: Start, kubelet: Kubelet) -> None:
    process = operator("--log-level", "DEBUG")
    space.apply("fish")
    eventually(lambda: space.condition("fish", "MetricsAvailable")[0] == "True", "read")
    token = base64.b64decode(space.get(SECRETS, "fish-admin")["data"]["token"]).decode()
    assert len(token) >= 32
    for kind in (DEPLOYMENTS, PODS, CONFIG_MAPS, EVENTS, MODELS, SERVICES):
        assert token not in json.dumps(space.all(kind))
    assert token not in process.text()


def test_what_is_not_supported_yet_is_said_and_gets_no_pods(space: Space, operator: Start) -> None:
    operator()
    space.apply("fish", {"model": {"source": "file:///a", "revision": "main"}})
    message = eventually(lambda: (c := space.condition("fish", "Degraded"))[1] == "Unsupported" and c[2], "said")
    assert "spec.model.revision 'main'" in message
    assert not space.all(DEPLOYMENTS)
