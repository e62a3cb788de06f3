"""The chart in a real API server: admission, rights, upgrade of the CRD, and what an uninstall leaves."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.chart.conftest import CHART, ROOT, Render
from tests.cluster.cluster import Cluster
from tests.cluster.errors import CommandError

CRD = "speculativemodels.pilotfish.dev"
AUTOSCALING = "{.spec.versions[0].schema.openAPIV3Schema.properties.spec.properties.autoscaling.type}"
EXAMPLE = ROOT / "examples/smollm2.yaml"


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace that enforces the Pod Security standard `restricted`; releases and the CRD are gone afterwards."""
    cluster.kubectl("create", "namespace", "pf")
    cluster.kubectl("label", "namespace", "pf", "pod-security.kubernetes.io/enforce=restricted")
    yield "pf"
    cluster.helm("uninstall", "fish", "-n", "pf", "--ignore-not-found")
    cluster.kubectl("delete", "crd", CRD, "--ignore-not-found")
    cluster.reset()


def install(cluster: Cluster, chart: Path = CHART, *flags: str) -> str:
    return cluster.helm("upgrade", "--install", "fish", str(chart), "-n", "pf", *flags)


def allowed(cluster: Cluster, verb: str, what: str, namespace: str, subresource: str = "") -> bool:
    """Whether the operator's ServiceAccount may."""
    group, _, resource = what.rpartition("/")
    resource, _, name = resource.partition(":")
    attributes = {
        "verb": verb, "group": group, "resource": resource, "name": name, "namespace": namespace,
        "subresource": subresource,
    }  # fmt: skip
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": "system:serviceaccount:pf:fish-pilotfish", "resourceAttributes": attributes},
    }
    answer = cluster.kubectl("create", "-o", "json", "-f", "-", input=json.dumps(review))
    return bool(json.loads(answer)["status"]["allowed"])


def test_notes_give_the_first_request(cluster: Cluster, namespace: str) -> None:
    notes = install(cluster).partition("NOTES:")[2]
    manifest = notes.partition("<<EOF")[2].partition("  EOF")[0]
    cluster.await_crd(CRD)
    cluster.kubectl("apply", "--dry-run=server", "-f", "-", input=manifest)
    assert "/v1/chat/completions" in notes


def test_restricted_admission_takes_the_pods(cluster: Cluster, namespace: str, render: Render) -> None:
    install(cluster)
    deadline = time.monotonic() + 20
    while not (pods := json.loads(cluster.kubectl("get", "pods", "-n", "pf", "-o", "json"))["items"]):
        events = cluster.kubectl("get", "events", "-n", "pf")
        assert "forbidden" not in events
        assert time.monotonic() < deadline, events
        time.sleep(0.2)
    assert pods[0]["metadata"]["labels"]["app.kubernetes.io/name"] == "pilotfish-operator"
    [probe] = [manifest for manifest in render() if manifest["kind"] == "Pod"]
    cluster.kubectl("apply", "--dry-run=server", "-f", "-", input=yaml.safe_dump(probe))
    probe["spec"]["containers"][0]["securityContext"]["capabilities"] = {}
    with pytest.raises(CommandError, match="violates PodSecurity"):
        cluster.kubectl("apply", "--dry-run=server", "-f", "-", input=yaml.safe_dump(probe))


def test_rights_in_the_whole_cluster(cluster: Cluster, namespace: str) -> None:
    install(cluster)
    assert allowed(cluster, "patch", "apps/deployments", "default")
    assert allowed(cluster, "patch", "pilotfish.dev/speculativemodels", "default", "status")
    assert allowed(cluster, "update", "coordination.k8s.io/leases:pilotfish-operator", "pf")
    for verb, what, namespace in (
        ("update", "coordination.k8s.io/leases:another", "pf"),
        ("update", "coordination.k8s.io/leases:pilotfish-operator", "default"),
        ("patch", "pilotfish.dev/speculativemodels", "default"),
        ("create", "/pods", "default"),
        ("delete", "/pods", "default"),
        ("delete", "/secrets", "default"),
        ("create", "rbac.authorization.k8s.io/roles", "default"),
        ("get", "/nodes", ""),
    ):
        assert not allowed(cluster, verb, what, namespace), f"{verb} {what} in {namespace}"
    assert not allowed(cluster, "create", "/pods", "default", "exec")


def test_rights_in_one_namespace(cluster: Cluster, namespace: str) -> None:
    install(cluster, CHART, "--set-json=watch.namespaces=[\"default\"]")
    assert allowed(cluster, "patch", "apps/deployments", "default")
    assert not allowed(cluster, "patch", "apps/deployments", "pf")
    assert not allowed(cluster, "list", "pilotfish.dev/speculativemodels", "kube-system")


def test_upgrade_brings_the_new_crd_and_uninstall_keeps_the_models(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    older = tmp_path / "pilotfish"
    shutil.copytree(CHART, older)
    [file] = (older / "files/crds").glob("*.yaml")
    crd = yaml.safe_load(file.read_text())
    whole = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del whole["properties"]["autoscaling"]
    del whole["x-kubernetes-validations"]  # they speak of autoscaling
    file.write_text(yaml.safe_dump(crd))
    install(cluster, older)
    assert not cluster.kubectl("get", "crd", CRD, "-o", f"jsonpath={AUTOSCALING}")

    install(cluster)
    assert cluster.kubectl("get", "crd", CRD, "-o", f"jsonpath={AUTOSCALING}")
    cluster.await_crd(CRD)
    cluster.kubectl("apply", "-f", str(EXAMPLE))
    model = json.loads(cluster.kubectl("get", "speculativemodel", "smollm2", "-o", "json"))
    written = yaml.safe_load(EXAMPLE.read_text())["spec"]
    assert model["spec"] == written | {"replicas": 1}, "nothing was pruned; outside autoscalers find their field"

    cluster.helm("uninstall", "fish", "-n", "pf")
    assert "smollm2" in cluster.kubectl("get", "spm")
    left = cluster.kubectl("get", "clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/instance=fish")
    assert not left.strip()

    install(cluster)
    assert "smollm2" in cluster.kubectl("get", "specmodel")


def test_without_the_crd(cluster: Cluster, namespace: str) -> None:
    notes = install(cluster, CHART, "--set=crds.enabled=false").partition("NOTES:")[2]
    assert "waits until the SpeculativeModel CRD is installed" in notes
    with pytest.raises(CommandError, match="NotFound"):
        cluster.kubectl("get", "crd", CRD)


def test_what_the_pages_say_is_accepted(cluster: Cluster, namespace: str) -> None:
    """Every example and the README's manifest, by the strict validation of an API server with our CRD."""
    install(cluster)
    cluster.await_crd(CRD)
    manifests = [path.read_text() for path in sorted((ROOT / "examples").glob("*.yaml"))]
    inline = re.findall(r"<<EOF\n(.*?)\n *EOF", (ROOT / "README.md").read_text(), re.S)
    assert manifests
    assert inline
    for manifest in [*manifests, *map(textwrap.dedent, inline)]:
        cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", input=manifest)
