"""Manifests: restricted pods, a template that only the spec's start-up part changes, flags as the engine has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pilotfish_operator import objects
from pilotfish_operator.api import Spec
from pilotfish_operator.objects import Owner

OWNER = Owner("ns", "fish", "uid-1")


def spec(**parts: Any) -> Spec:
    return Spec.model_validate({"model": {"source": "package://p/m.gguf"}} | parts)


def container(**parts: Any) -> dict[str, Any]:
    found: dict[str, Any] = objects.template(OWNER, spec(**parts), "image:1")["spec"]["containers"][0]
    return found


def flags(**parts: Any) -> dict[str, str]:
    words = objects.arguments(OWNER, spec(**parts))[1:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_pods_are_restricted() -> None:
    pod = objects.template(OWNER, spec(), "image:1")["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = pod["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_grace_is_longer_than_pre_stop_and_drain() -> None:
    pod = objects.template(OWNER, spec(rollout={"drainSeconds": 30}), "image:1")["spec"]
    pre_stop = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > pre_stop + 30


def test_the_default_flags() -> None:
    assert objects.arguments(OWNER, spec())[0] == "package://p/m.gguf"
    assert flags() == {
        "--method": "Auto", "--host": "$(POD_IP)", "--port": "8000", "--served-name": "fish", "--dtype": "auto",
        "--num-steps": "5", "--topk": "1", "--num-draft-tokens": "6", "--max-running-requests": "256",
        "--memory-fraction": "0.9", "--admin-token-file": "/etc/pilotfish/admin/token",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"engine": {"maxModelLen": 2048}}, {"--max-model-len": "2048"}),
        ({"engine": {"memoryFraction": 0.5}}, {"--memory-fraction": "0.5"}),
        ({"engine": {"kvTokens": 100000, "chunkSize": 2048}}, {"--kv-tokens": "100000", "--chunk-size": "2048"}),
        (
            {"engine": {"toolCallParser": "qwen3_coder", "reasoningParser": "none"}},
            {"--tool-call-parser": "qwen3_coder", "--reasoning-parser": "none"},
        ),
        ({"engine": {"pageSize": 4}}, {"--page-size": "4"}),
        ({"engine": {"dtype": "float32"}}, {"--dtype": "float32"}),
        ({"engine": {"tensorParallelSize": 2}}, {"--tensor-parallel-size": "2"}),
        ({"speculation": {"topK": 4, "numSteps": 5}}, {"--topk": "4", "--num-draft-tokens": "21"}),
        (
            {"speculation": {"method": "STANDALONE", "draft": {"source": "pvc://claim/d"}}},
            {"--draft": "pvc://claim/d"},
        ),
        ({"access": {"apiKeySecretRef": {"name": "s", "key": "k"}}}, {"--api-key-file": "/etc/pilotfish/access/k"}),
    ],
)
def test_what_the_spec_says_becomes_a_flag(parts: dict[str, Any], expected: dict[str, str]) -> None:
    found = flags(**parts)
    assert {name: found.get(name) for name in expected} == expected


def test_a_revision_is_part_of_the_source() -> None:
    of = spec(model={"source": "hf://org/name/file.gguf", "revision": "v1.2"})
    assert objects.arguments(OWNER, of)[0] == "hf://org/name/file.gguf@v1.2"


def test_plain_decoding_has_no_speculation_flags() -> None:
    assert not {"--num-steps", "--topk", "--num-draft-tokens"} & flags(speculation={"method": "None"}).keys()


def test_accelerators_follow_the_tensor_parallel_size() -> None:
    assert container(engine={"tensorParallelSize": 4})["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert container(resources={"accelerator": "amd.com/gpu"})["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert container(resources={"accelerator": "None"})["resources"] == {}


def test_shared_memory_is_for_ranks_on_several_devices() -> None:
    def shared(**parts: Any) -> list[dict[str, Any]]:
        pod = objects.template(OWNER, spec(**parts), "i")["spec"]
        mounted = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        volumes = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
        assert len(mounted) == len(volumes)
        assert not any(mount.get("readOnly") for mount in mounted)
        return volumes

    assert shared() == []
    assert shared(engine={"tensorParallelSize": 2}) == [{"medium": "Memory", "sizeLimit": "2Gi"}]


def test_claims_and_secrets_are_mounted_read_only() -> None:
    pod = objects.template(OWNER, spec(
        model={"source": "pvc://weights/llama", "tokenSecretRef": {"name": "hf", "key": "token"}},
        cache={"persistentVolumeClaim": "cache"}), "i")["spec"]  # fmt: skip
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes["target"]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "cache"}
    assert volumes["hub"]["secret"]["secretName"] == "hf"
    writable = {mount["name"] for mount in pod["containers"][0]["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"tmp", "cache"}
    assert pod["containers"][0]["args"][0] == "pvc://weights/llama"


def test_scheduling_goes_into_the_pod_as_it_is() -> None:
    scheduling = {
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "topologySpread": [{"maxSkew": 1}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    }
    pod = objects.template(OWNER, spec(scheduling=scheduling), "i")["spec"]
    assert pod["nodeSelector"] == {"a": "b"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod["topologySpreadConstraints"] == [{"maxSkew": 1}]
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("high", "nvidia")


RUNNING = [
    {"speculation": {"tuning": "Fixed"}}, {"speculation": {"disableThreshold": 9}}, {"replicas": 3},
    {"autoscaling": {"maxReplicas": 3}}, {"slo": {"tokensPerSecondPerUser": 10}}, {"rollout": {"maxSurge": 2}},
    {"speculation": {"method": "Auto", "numSteps": 5}},
]  # fmt: skip
STARTING = [
    {"speculation": {"method": "NGRAM"}}, {"speculation": {"numSteps": 4}}, {"engine": {"maxConcurrency": 8}},
    {"rollout": {"drainSeconds": 5}}, {"resources": {"accelerator": "None"}}, {"model": {"source": "file:///x"}},
]  # fmt: skip


@pytest.mark.parametrize("parts", RUNNING, ids=str)
def test_what_running_pods_can_change_rolls_nothing(parts: dict[str, Any]) -> None:
    assert objects.template_hash(OWNER, spec(**parts)) == objects.template_hash(OWNER, spec())
    assert objects.template(OWNER, spec(**parts), "i") == objects.template(OWNER, spec(), "i")


@pytest.mark.parametrize("parts", STARTING, ids=str)
def test_what_they_start_with_rolls_them(parts: dict[str, Any]) -> None:
    assert objects.template_hash(OWNER, spec(**parts)) != objects.template_hash(OWNER, spec())


def test_an_annotation_rolls_them_on_demand() -> None:
    again = Owner("ns", "fish", "uid-1", restart="2026-01-01")
    assert objects.template_hash(again, spec()) != objects.template_hash(OWNER, spec())


def test_selectors_carry_no_version() -> None:
    made = objects.deployment(OWNER, spec(), objects.template(OWNER, spec(), "image:9"), 1, {})
    assert made["spec"]["selector"]["matchLabels"] == OWNER.selector
    assert "9" not in json.dumps(OWNER.labels)


def test_a_made_claim_can_be_shared_when_replicas_may_be_several() -> None:
    def modes(**parts: Any) -> Any:
        made = objects.children(OWNER, spec(cache={"size": "10Gi"}, **parts))
        return next(o for o in made if o["kind"] == "PersistentVolumeClaim")["spec"]["accessModes"]

    assert modes() == ["ReadWriteOnce"]
    assert modes(autoscaling={"maxReplicas": 2}) == ["ReadWriteMany"]
