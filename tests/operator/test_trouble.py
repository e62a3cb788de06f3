"""What breaks beside a healthy cluster: each trouble is said, is its own model's, and ends when its cause does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from pilotfish_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, DISRUPTION_BUDGETS, MODELS, PODS, SECRETS, SERVICES
from tests.operator.live import Kubelet, OperatorProcess, Space, eventually

Start = Callable[..., OperatorProcess]


def degraded(space: Space, name: str, reason: str) -> str:
    """The message, once the model is Degraded for this reason."""
    look = lambda: (c := space.condition(name, "Degraded"))[:2] == ("True", reason) and c[2]  # noqa: E731
    return eventually(look, f"{name} is Degraded, {reason}; now {space.condition(name, 'Degraded')}", 30)


def serves(space: Space, name: str) -> None:
    eventually(lambda: space.condition(name, "Ready")[0] == "True", f"{name} serves", 30)


def well(space: Space, name: str) -> None:
    eventually(lambda: space.condition(name, "Degraded")[:2] == ("False", "AsExpected"), f"{name} is well", 30)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"concurrency_seconds_total": -7.0}, "concurrency_seconds_total"),
        ({"profile": {"verify_ms": [[1, -3.0]]}}, "verify_ms"),
        ({"pod": "somebody-else"}, "another pod"),
    ],
)
def test_a_report_that_cannot_be_true_is_named_and_the_status_goes_on(
    space: Space, operator: Start, kubelet: Kubelet, changes: dict[str, Any], word: str
) -> None:
    process = operator()
    space.apply("fish")
    eventually(lambda: space.condition("fish", "MetricsAvailable")[0] == "True", "read")
    (engine,) = kubelet.engines.values()
    lie = json.loads(engine.report().model_dump_json()) | changes
    engine.says = lambda method: (200, json.dumps(lie)) if method == "GET" else None
    assert word in degraded(space, "fish", "ReportsNotBelieved")
    assert space.condition("fish", "MetricsAvailable")[:2] == ("False", "ReportsNotBelieved")
    space.patch("speculativemodel", "fish", {"spec": {"replicas": 2}})
    eventually(lambda: space.replicas("fish") == 2, "the model is reconciled all the same")
    engine.says = lambda _method: None
    well(space, "fish")
    assert "Traceback" not in process.text()


def test_engines_that_hold_another_token_are_a_condition_until_they_take_the_settings(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    operator()
    space.apply("fish")
    serves(space, "fish")
    (engine,) = kubelet.engines.values()
    well(space, "fish")
    space.kubectl("delete", "secret", "fish-admin")
    eventually(lambda: space.get(SECRETS, "fish-admin"), "made again")
    space.patch("speculativemodel", "fish", {"spec": {"speculation": {"tuning": "Fixed", "disableThreshold": 7}}})
    assert "another admin token than the Secret" in degraded(space, "fish", "SettingsDrift")
    assert space.condition("fish", "SettingsApplied")[0] == "False"
    engine.token = kubelet.token("fish")  # as an engine does that reads its file again
    well(space, "fish")
    assert engine.envelope.disable_threshold == 7


@pytest.fixture
def closed_webhook(space: Space) -> Iterator[Callable[[str], None]]:
    """Has a webhook that cannot be reached refuse every write of one kind here, until the test ends."""
    name = f"closed-{space.name}"

    def close(plural: str, group: str = "") -> None:
        hook = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": name},
            "webhooks": [
                {
                    "name": "closed.example.com",
                    "clientConfig": {"url": "https://127.0.0.1:1/", "caBundle": ""},
                    "rules": [
                        {"apiGroups": [group], "apiVersions": ["*"], "operations": ["*"], "resources": [plural]}
                    ],
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.name}},
                    "failurePolicy": "Fail",
                    "sideEffects": "None",
                    "timeoutSeconds": 1,
                    "admissionReviewVersions": ["v1"],
                }
            ],
        }  # fmt: skip
        space.cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump(hook))

    yield close
    space.cluster.kubectl("delete", "validatingwebhookconfiguration", name, "--ignore-not-found")


@pytest.mark.parametrize(
    ("plural", "group", "kind"), [("deployments", "apps", DEPLOYMENTS), ("services", "", SERVICES)]
)
def test_a_write_that_fails_is_in_the_status_and_keeps_nothing_else_from_being_made(
    space: Space, operator: Start, kubelet: Kubelet, closed_webhook: Callable[..., None],
    plural: str, group: str, kind: Any,
) -> None:  # fmt: skip
    closed_webhook(plural, group)
    operator()
    space.apply("fish")
    message = degraded(space, "fish", "WriteFailed")
    assert f"{kind.name} fish" in message
    assert "closed.example.com" in message
    assert all(space.all(other) for other in {DEPLOYMENTS, SERVICES, CONFIG_MAPS, DISRUPTION_BUDGETS} - {kind})
    space.cluster.kubectl("delete", "validatingwebhookconfiguration", f"closed-{space.name}")
    well(space, "fish")


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"scheduling": {"affinity": {"nodeAfinity": {}}}}, "spec.scheduling.affinity"),
        ({"scheduling": {"topologySpread": [{"maxSkew": "two"}]}}, "spec.scheduling.topologySpread"),
        ({"resources": {"accelerator": "None", "requests": {"cpu": "4"}, "limits": {"cpu": "2"}}}, "spec.resources"),
    ],
)
def test_a_wrong_free_form_part_is_named_where_it_was_written(
    space: Space, operator: Start, part: dict[str, Any], word: str
) -> None:
    operator()
    space.apply("fish", part)
    assert word in degraded(space, "fish", "Rejected")
    assert not space.all(DEPLOYMENTS)


@pytest.mark.parametrize("plural", ["poddisruptionbudgets", "serviceaccounts"])
def test_a_kind_that_may_not_be_read_or_made_stops_no_other(
    space: Space, operator: Start, kubelet: Kubelet, plural: str
) -> None:
    operator().end()
    rules = space.api.get(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}/roles/operator") or {}
    kept = [rule for rule in rules["rules"] if rule["resources"] != [plural]]
    space.patch("role", "operator", {"rules": kept})
    process = operator()
    space.apply("fish")
    eventually(lambda: space.all(DEPLOYMENTS) and space.all(SERVICES), "the rest is made")
    message = degraded(space, "fish", "CannotRead")
    assert f"{plural} cannot be listed" in message
    assert "forbidden" in message
    if plural == "poddisruptionbudgets":
        serves(space, "fish")
    space.patch("role", "operator", {"rules": rules["rules"]})
    well(space, "fish")
    assert space.all(DISRUPTION_BUDGETS)
    assert "Traceback" not in process.text()


def test_pods_that_cannot_be_read_leave_the_deployment_as_it_is(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    first = operator()
    space.apply("fish", {"replicas": 2})
    serves(space, "fish")
    first.end()
    rules = space.api.get(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}/roles/operator") or {}
    space.patch("role", "operator", {"rules": [rule for rule in rules["rules"] if rule["resources"] != ["pods"]]})
    operator()
    assert "pods cannot be listed" in degraded(space, "fish", "CannotRead")
    assert space.condition("fish", "Ready")[0] == "Unknown"
    assert space.replicas("fish") == 2


@pytest.mark.parametrize("lost", ["models", "credentials"])
def test_an_operator_to_which_nothing_succeeds_is_not_healthy_and_then_ends(
    space: Space, operator: Start, lost: str
) -> None:
    process = operator("--patience", "3s")
    eventually(lambda: process.metric("pilotfish_operator_leading") == 1, "leads")
    if lost == "credentials":
        space.kubectl("delete", "serviceaccount", "operator")
    else:
        process.end()
        space.patch("role", "operator", {"rules": []})
        process = operator("--patience", "3s")
    eventually(lambda: process.healthz()[0] in (0, 500) and process.process.poll() is None, "not healthy", 30)
    eventually(lambda: process.process.poll() is not None, "it ends", 30)
    assert process.process.returncode == 1
    assert "stands still" in process.text()
    assert "Traceback" not in process.text()


@pytest.mark.parametrize("reason", ["Evicted", "UnexpectedAdmissionError"])
def test_a_pod_that_ended_for_good_counts_for_nothing_but_an_event(
    space: Space, operator: Start, kubelet: Kubelet, reason: str
) -> None:
    operator()
    space.apply("fish")
    serves(space, "fish")
    pod = space.all(PODS)[0]["metadata"]["name"]
    ended = {"phase": "Failed", "reason": reason, "message": "the node says so"}
    kubelet.patch_status(pod, ended | {"conditions": [{"type": "Ready", "status": "False"}]})
    eventually(lambda: len(space.all(PODS)) == 2, "its replacement")
    (message,) = eventually(lambda: space.events("PodFinished"), "the event")
    assert pod in message
    assert reason in message
    eventually(lambda: space.status("fish")["readyReplicas"] == 1, "the replacement counts")
    well(space, "fish")
    eventually(lambda: space.condition("fish", "Progressing")[:2] == ("False", "Complete"), "nothing goes on")
    assert len(space.events("PodFinished")) == 1


def test_what_hands_change_in_children_is_put_right_and_said(space: Space, operator: Start, kubelet: Kubelet) -> None:
    operator()
    space.apply("fish")
    serves(space, "fish")

    def container() -> dict[str, Any]:
        return space.get(DEPLOYMENTS, "fish")["spec"]["template"]["spec"]["containers"][0]

    space.kubectl("set", "env", "deployment/fish", "EVIL=1")
    eventually(lambda: not [e for e in container()["env"] if e["name"] == "EVIL"], "the variable is taken out")
    space.kubectl("set", "image", "deployment/fish", "engine=other:1")
    eventually(lambda: container()["image"] != "other:1", "the image is back")
    space.patch("service", "fish", {"spec": {"sessionAffinity": "ClientIP", "externalIPs": ["192.0.2.1"]}})
    eventually(lambda: "externalIPs" not in space.get(SERVICES, "fish")["spec"], "the Service is as it was")
    space.patch("configmap", "fish-engine", {"data": {"PILOTFISH_METHOD": "None"}})
    eventually(lambda: "PILOTFISH_METHOD" not in space.get(CONFIG_MAPS, "fish-engine")["data"], "the settings too")
    said = eventually(lambda: len(m := space.events("DriftCorrected")) >= 4 and m, "all of it is said")
    assert any("kubectl-set had set" in m and "EVIL" in m for m in said)
    serves(space, "fish")


def test_children_that_lost_their_model_are_adopted_and_their_pods_serve_on(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    operator()
    space.apply("fish")
    serves(space, "fish")
    before, token = space.get(DEPLOYMENTS, "fish"), space.get(SECRETS, "fish-admin")["data"]
    pods = {pod["metadata"]["uid"] for pod in space.all(PODS)}
    space.kubectl("delete", "speculativemodel", "fish", "--cascade=orphan")
    space.apply("fish")
    eventually(lambda: space.events("Adopted"), "adopted")
    serves(space, "fish")
    after = space.get(DEPLOYMENTS, "fish")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    owners = {ref["name"] for ref in space.get(SECRETS, "fish-admin")["metadata"]["ownerReferences"]}
    assert owners == {"fish"}
    assert space.get(SECRETS, "fish-admin")["data"] == token
    assert {pod["metadata"]["uid"] for pod in space.all(PODS)} == pods


def test_a_paused_model_keeps_replicas_and_settings_and_is_still_repaired(
    space: Space, operator: Start, kubelet: Kubelet
) -> None:
    operator()
    space.apply(
        "fish",
        {"autoscaling": {"maxReplicas": 3, "targetConcurrency": 1, "stableWindow": "6s", "scaleDownDelay": "0s"}},
        paused=True,
    )
    serves(space, "fish")
    assert space.condition("fish", "Paused")[0] == "True"
    space.patch("service", "fish", {"spec": {"externalIPs": ["192.0.2.1"]}})
    eventually(lambda: space.events("DriftCorrected"), "repaired")
    (engine,) = kubelet.engines.values()
    held, engine.load = engine.envelope, 40
    reads = engine.reads
    eventually(lambda: engine.reads > reads + 8, "the load is known for longer than its window")
    assert space.replicas("fish") == 1
    assert engine.envelope.num_steps == held.num_steps
    space.patch("speculativemodel", "fish", {"spec": {"paused": False}})
    eventually(lambda: (space.replicas("fish") or 0) > 1, "decisions go on")
    eventually(lambda: space.condition("fish", "Paused")[0] == "False", "and it is said")


def test_an_outside_autoscaler_finds_replicas_on_a_model_that_names_none(space: Space) -> None:
    space.apply("fish")
    scale = space.api.get(f"/apis/pilotfish.dev/v1alpha1/namespaces/{space.name}/speculativemodels/fish/scale")
    assert scale is not None
    assert scale["spec"]["replicas"] == 1
    space.kubectl("scale", "speculativemodel/fish", "--replicas=3")
    assert space.get(MODELS, "fish")["spec"]["replicas"] == 3
    space.apply("auto", {"autoscaling": {"maxReplicas": 4}})
    assert space.get(MODELS, "auto")["spec"]["autoscaling"]["minReplicas"] == 1
