"""The CRD: what is in crds/ is what the models say, and a real API server takes it and refuses bad manifests by it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pilotfish_operator import crd
from pilotfish_operator.api import Spec
from tests.cluster.cluster import Cluster
from tests.cluster.errors import CommandError
from tests.operator.live import MODEL, ROOT

MINIMAL: dict[str, Any] = {"model": {"source": MODEL}}


def test_the_file_is_what_the_models_say() -> None:
    committed = (ROOT / "crds" / crd.FILE).read_text(encoding="utf-8")
    assert committed == crd.text(), "run: python -m pilotfish_operator.crd crds"


def every_field(schema: dict[str, Any], path: str = "spec") -> dict[str, dict[str, Any]]:
    found = {path: schema}
    for name, field in schema.get("properties", {}).items():
        found |= every_field(field, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        found |= every_field(schema["items"], f"{path}[]")
    return found


def test_every_field_says_what_it_is() -> None:
    version = crd.definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for part in ("spec", "status"):
        fields = every_field(version[part], part)
        silent = [path for path, field in fields.items() if not field.get("description") and not path.endswith("[]")]
        assert silent == []


def test_only_the_source_is_required_and_the_defaults_are_these() -> None:
    spec = Spec.model_validate(MINIMAL)
    assert spec.model_dump(by_alias=True, exclude_none=True) == {
        "model": {"source": MODEL},
        "speculation": {"method": "Auto", "tuning": "Adaptive", "numSteps": 5, "topK": 1, "disableThreshold": "Auto"},
        "engine": {"tensorParallelSize": 1, "maxConcurrency": 256, "dtype": "auto", "memoryFraction": 0.9},
        "resources": {"accelerator": "nvidia.com/gpu", "requests": {}, "limits": {}},
        "scheduling": {"nodeSelector": {}, "tolerations": [], "topologySpread": []},
        "rollout": {"drainSeconds": 600, "maxSurge": "Auto"},
        "paused": False,
    }
    assert spec.speculation.draft_tokens == 6


GOOD = {
    "minimal": {},
    "all of operator.md": {
        "model": {"source": "hf://org/model", "revision": "0e9e39f", "tokenSecretRef": {"name": "hf", "key": "token"},
                  "servedName": "m"},
        "speculation": {"method": "EAGLE3", "draft": {"source": "hf://org/draft"}, "tuning": "Adaptive", "numSteps": 5,
                        "topK": 4, "numDraftTokens": 16, "disableThreshold": 12},
        "engine": {"tensorParallelSize": 2, "maxModelLen": 8192, "maxConcurrency": 256, "dtype": "auto",
                   "memoryFraction": 0.85, "kvTokens": 400000, "chunkSize": 2048, "pageSize": 16,
                   "toolCallParser": "hermes", "reasoningParser": "none"},
        "resources": {"accelerator": "nvidia.com/gpu", "requests": {"cpu": 2, "memory": "8Gi"}},
        "scheduling": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}],
                       "affinity": {"nodeAffinity": {}}, "topologySpread": [{"maxSkew": 1}], "priorityClassName": "p"},
        "autoscaling": {"minReplicas": 1, "maxReplicas": 4, "targetConcurrency": "Auto", "stableWindow": "1m30s",
                        "scaleDownDelay": "300s"},
        "slo": {"tokensPerSecondPerUser": 30}, "cache": {"size": "10Gi", "storageClassName": "fast"},
        "rollout": {"drainSeconds": 600, "maxSurge": "Auto"},
        "access": {"apiKeySecretRef": {"name": "key", "key": "api"}},
    },
}  # fmt: skip

SCHEME = "write the source as hf://"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": {}}, "spec.model.source: Required value"),
    ({"model": {"source": "meta-llama/Llama"}}, SCHEME),
    ({"model": {"source": "hf://"}}, SCHEME),
    ({"speculation": {"method": "MEDUSA"}}, 'supported values: "None", "NGRAM", "STANDALONE", "EAGLE", "EAGLE3"'),
    ({"speculation": {"method": "EAGLE3"}}, "method EAGLE3 needs a draft model: set spec.speculation.draft.source"),
    ({"speculation": {"method": "NGRAM", "draft": {"source": "hf://a/b"}}}, "method NGRAM uses no draft model: remove"),
    ({"speculation": {"method": "None", "draft": {"source": "hf://a/b"}}}, "method None uses no draft model: remove"),
    ({"speculation": {"draft": {"source": "b"}}}, SCHEME),
    ({"speculation": {"numSteps": 9}}, "should be less than or equal to 8"),
    ({"speculation": {"numSteps": 0}}, "should be greater than or equal to 1"),
    ({"speculation": {"topK": 9}}, "should be less than or equal to 8"),
    ({"speculation": {"numDraftTokens": 1}}, "should be greater than or equal to 2"),
    ({"speculation": {"numDraftTokens": 65}}, "should be less than or equal to 64"),
    ({"speculation": {"disableThreshold": 0}}, "write Auto or a number of running requests from 1"),
    ({"speculation": {"disableThreshold": "never"}}, "write Auto or a number of running requests from 1"),
    ({"engine": {"tensorParallelSize": 65}}, "should be less than or equal to 64"),
    ({"engine": {"pageSize": 12}}, "choose a power of two from 1 to 256 for pageSize"),
    ({"engine": {"memoryFraction": 0.99}}, "should be less than or equal to 0.98"),
    ({"engine": {"toolCallParser": "Hermes 2"}}, "should match"),
    ({"engine": {"maxModelLen": 15}}, "should be greater than or equal to 16"),
    ({"engine": {"tensorParallelSize": 2}, "resources": {"accelerator": "None"}}, "above 1 needs accelerators"),
    ({"resources": {"requests": {"cpu": "lots"}}}, "should match"),
    ({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas must not exceed maxReplicas: lower"),
    ({"autoscaling": {"maxReplicas": 0}}, "should be greater than or equal to 1"),
    ({"autoscaling": {"maxReplicas": 2, "stableWindow": "60"}}, "write a duration as Go does, such as 60s or 5m"),
    ({"autoscaling": {"maxReplicas": 2, "stableWindow": "1s"}}, "choose a duration from 6s to 1h"),
    ({"autoscaling": {"maxReplicas": 2, "targetConcurrency": 0}}, "write Auto or a whole number from 1"),
    ({"replicas": 2, "autoscaling": {"maxReplicas": 2}}, "replicas and autoscaling exclude each other: remove"),
    ({"replicas": -1}, "should be greater than or equal to 0"),
    ({"cache": {}}, "set exactly one of persistentVolumeClaim, emptyDir and size"),
    ({"cache": {"emptyDir": {}, "size": "1Gi"}}, "set exactly one of persistentVolumeClaim, emptyDir and size"),
    ({"cache": {"emptyDir": {}, "storageClassName": "x"}}, "storageClassName belongs to size"),
    ({"slo": {"tokensPerSecondPerUser": 0}}, "should be greater than 0"),
    ({"rollout": {"drainSeconds": -1}}, "should be greater than or equal to 0"),
    ({"speculation": {"steps": 3}}, 'unknown field "spec.speculation.steps"'),
]  # fmt: skip


def dry_run(cluster: Cluster, spec: dict[str, Any], name: str = "fish") -> None:
    manifest = {"apiVersion": "pilotfish.dev/v1alpha1", "kind": "SpeculativeModel", "metadata": {"name": name},
                "spec": MINIMAL | spec}  # fmt: skip
    cluster.kubectl("create", "--dry-run=server", "-f", "-", input=yaml.safe_dump(manifest))


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD)
def test_good_manifests_are_taken(cluster: Cluster, spec: dict[str, Any]) -> None:
    dry_run(cluster, spec)
    Spec.model_validate(MINIMAL | spec)


@pytest.mark.parametrize(("spec", "sentence"), BAD, ids=[str(spec)[:60] for spec, _ in BAD])
def test_bad_manifests_are_refused_with_what_to_do(cluster: Cluster, spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CommandError) as refused:
        dry_run(cluster, spec)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", ["a" * 53, "1st"])
def test_names_that_no_service_could_have_are_refused(cluster: Cluster, name: str) -> None:
    with pytest.raises(CommandError, match="choose a name of at most 52 lower-case letters"):
        dry_run(cluster, {}, name)


def test_explain_and_short_names(cluster: Cluster) -> None:
    assert "DESCRIPTION" in cluster.kubectl("explain", "speculativemodel.spec.speculation.numSteps")
    names = cluster.kubectl("api-resources", "--api-group=pilotfish.dev", "--no-headers")
    assert names.split()[:2] == ["speculativemodels", "spm,specmodel"]
