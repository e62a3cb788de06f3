"""What the chart renders, by value; no cluster."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pilotfish_operator import kinds
from tests.chart.conftest import CHART, ROOT, Manifest, Render

EVERYTHING: dict[str, Any] = {
    "replicas": 2,
    "watch__namespaces": ["a", "b"],
    "metrics__serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
    "podLabels": {"team": "x"},
    "podAnnotations": {"note": "y"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "priorityClassName": "high",
    "imagePullSecrets": [{"name": "pull"}],
    "serviceAccount__annotations": {"role": "z"},
}


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def container(manifests: list[Manifest]) -> dict[str, Any]:
    [deployment] = of_kind(manifests, "Deployment")
    [only] = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_lint(helm: Path, values: dict[str, Any]) -> None:
    sets = [f"--set-json={key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]
    done = subprocess.run([helm, "lint", "--strict", CHART, *sets], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


def test_defaults(render: Render) -> None:
    kinds = sorted(manifest["kind"] for manifest in render())
    assert kinds == [
        "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Deployment", "Pod", "Role", "RoleBinding",
        "Service", "ServiceAccount",
    ]  # fmt: skip


def test_everything(render: Render) -> None:
    manifests = render(**EVERYTHING)
    assert not of_kind(manifests, "ClusterRole")
    roles = {(role["metadata"]["namespace"], role["metadata"]["name"]) for role in of_kind(manifests, "Role")}
    assert roles == {("a", "fish-pilotfish"), ("b", "fish-pilotfish"), ("pf", "fish-pilotfish-lease")}
    assert {binding["metadata"]["namespace"] for binding in of_kind(manifests, "RoleBinding")} == {"a", "b", "pf"}
    args = container(manifests)["args"]
    assert "--namespace=a" in args
    assert "--namespace=b" in args
    [budget] = of_kind(manifests, "PodDisruptionBudget")
    [deployment] = of_kind(manifests, "Deployment")
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"]["team"] == "x"
    assert pod["metadata"]["annotations"] == {"note": "y"}
    assert pod["spec"]["nodeSelector"] == {"disk": "ssd"}
    assert pod["spec"]["priorityClassName"] == "high"
    [monitor] = of_kind(manifests, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [policy] = of_kind(manifests, "NetworkPolicy")
    assert policy["spec"]["ingress"][0]["from"] == [{"namespaceSelector": {}}]


def test_selectors_hold_through_upgrades(render: Render) -> None:
    """A Deployment's selector can never change, so nothing that changes with a version may be in it."""
    [deployment] = of_kind(render(), "Deployment")
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert selector == {"app.kubernetes.io/name": "pilotfish-operator", "app.kubernetes.io/instance": "fish"}
    assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, "pilotfish-operator:0.1.0"),
        ({"tag": "main"}, "pilotfish-operator:main"),
        ({"registry": "registry.example:5000", "repository": "x/y"}, "registry.example:5000/x/y:0.1.0"),
        ({"tag": "main", "digest": "sha256:" + "0" * 64}, "pilotfish-operator@sha256:" + "0" * 64),
    ],
)
def test_images(render: Render, image: dict[str, str], expected: str) -> None:
    operator = {f"image__{key}": value for key, value in image.items()}
    engine = {f"engine__image__{key}": value for key, value in image.items()}
    made = container(render(**operator, **engine))
    assert made["image"] == expected
    env = {entry["name"]: entry.get("value") for entry in made["env"]}
    assert env["PILOTFISH_ENGINE_IMAGE"] == expected.replace("pilotfish-operator", "pilotfish-engine")


def test_pods_are_restricted(render: Render) -> None:
    """The fields that the Pod Security standard `restricted` asks for; admission itself is asked in test_install."""
    manifests = render()
    pods = [of_kind(manifests, "Deployment")[0]["spec"]["template"]["spec"], of_kind(manifests, "Pod")[0]["spec"]]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in pod["containers"]:
            assert one["securityContext"]["readOnlyRootFilesystem"] is True
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in one["resources"]["limits"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bogus": 1}, "additional properties 'bogus' not allowed"),
        ({"image__tagg": "x"}, "additional properties 'tagg' not allowed"),
        ({"replicas": -1}, "minimum: got -1, want 0"),
        ({"replicas": "two"}, "got string, want integer"),
        ({"port": 80}, "minimum: got 80, want 1,024"),
        ({"logLevel": "LOUD"}, "value must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
        ({"watch__namespaces": ["Not_A_Name"]}, "does not match pattern"),
        ({"watch__namespaces": ["a", "a"]}, "items at 0 and 1 are equal"),
        ({"image__digest": "sha256:short"}, "does not match pattern"),
        ({"engine__image__repository": ""}, "minLength: got 0, want 1"),
    ],
)
def test_bad_values_are_refused(render: Render, values: dict[str, Any], message: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        render(**values)
    assert message in refusal.value.stderr


def test_schema_describes_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def visit(schema: dict[str, Any], value: Any, path: str) -> None:
        assert schema.get("description"), f"{path or 'root'} is not described"
        if "properties" not in schema:
            return
        assert schema["additionalProperties"] is False, path
        assert value.keys() <= schema["properties"].keys()
        for key in value:
            visit(schema["properties"][key], value[key], f"{path}.{key}")

    visit(schema, values, "")


def test_the_chart_carries_the_generated_crd(render: Render) -> None:
    generated = {path.name: path.read_text() for path in (ROOT / "crds").glob("*.yaml")}
    carried = {path.name: path.read_text() for path in (CHART / "files/crds").glob("*.yaml")}
    assert generated, "crds/ is empty"
    assert carried == generated, "run `make crds`"
    [rendered] = of_kind(render(), "CustomResourceDefinition")
    assert rendered["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    [text] = generated.values()
    assert rendered["spec"] == yaml.safe_load(text)["spec"]
    assert not of_kind(render(crds__enabled=False), "CustomResourceDefinition")


def test_chart_version_is_the_projects(helm: Path) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()
    example = yaml.safe_load(chart["annotations"]["artifacthub.io/crdsExamples"])
    assert [model["kind"] for model in example] == ["SpeculativeModel"]


def rights(rules: list[dict[str, list[str]]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("namespaces", [[], ["a"]])
def test_the_roles_give_what_the_operator_uses_and_no_more(render: Render, namespaces: list[str]) -> None:
    manifests = render(watch__namespaces=namespaces)
    lease = next(role for role in of_kind(manifests, "Role") if role["metadata"]["name"].endswith("-lease"))
    assert rights(lease["rules"]) == rights(kinds.lease_permissions())
    named = [rule for rule in lease["rules"] if rule["verbs"] != ["create"]]  # a name is not known to `create`
    assert [rule["resourceNames"] for rule in named] == [["pilotfish-operator"]]
    roles = of_kind(manifests, "ClusterRole") or [
        role for role in of_kind(manifests, "Role") if role["metadata"]["namespace"] == "a"
    ]
    assert [rights(role["rules"]) for role in roles] == [rights(kinds.permissions())]
