"""What a process is told, as tables: expansion, rewriting of paths, quantities, variables."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from tests.cluster.node import environment
from tests.cluster.node.environment import MissingReference
from tests.cluster.node.probes import Verdict
from tests.cluster.node.status import View, phase


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A", "$A"),
        ("$(A", "$(A"),
    ],
)
def test_expansion_is_a_kubelets(text: str, expected: str) -> None:
    assert environment.expand(text, {"A": "1", "B": "2"}) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/etc/app", "/S/conf"),
        ("/etc/app/x.yaml", "/S/conf/x.yaml"),
        ("--config=/etc/app/x.yaml", "--config=/S/conf/x.yaml"),
        ("file:///etc/app/x", "file:///S/conf/x"),
        ('{"path": "/etc/app"}', '{"path": "/S/conf"}'),
        ("/a:/etc/app:/b", "/a:/S/conf:/b"),
        ("/etc/app/nested/x", "/S/nested/x"),
        ("/etc/application", "/etc/application"),
        ("/etc/app.d/x", "/etc/app.d/x"),
        ("/usr/etc/app", "/usr/etc/app"),
        ("http://host/etc/app", "http://host/etc/app"),
        ("--host=0.0.0.0", "--host=127.1.2.3"),
        ("0.0.0.0:8080", "127.1.2.3:8080"),
        ("10.0.0.0.0", "10.0.0.0.0"),
    ],
)
def test_mounted_paths_and_the_wildcard_address_are_rewritten(text: str, expected: str) -> None:
    paths = {"/etc/app/": "/S/conf", "/etc/app/nested": "/S/nested"}
    assert environment.rewriter(paths, "127.1.2.3")(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("500m", "0.5"), ("2Gi", "2147483648"), ("1e3", "1000"), ("3", "3"), ("1.5k", "1500")]
)
def test_quantities(text: str, expected: str) -> None:
    assert environment.quantity(text) == Decimal(expected)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ({"resource": "limits.cpu"}, "2"),  # 1500m, rounded up
        ({"resource": "limits.cpu", "divisor": "1m"}, "1500"),
        ({"resource": "limits.cpu", "divisor": "0"}, "2"),
        ({"resource": "requests.memory", "divisor": "1Mi"}, "64"),
        ({"resource": "limits.memory", "divisor": "1Gi"}, "8"),  # no limit: the node's
        ({"resource": "requests.cpu"}, "0"),
    ],
)
def test_resource_fields(reference: dict[str, Any], expected: str) -> None:
    container = {"resources": {"limits": {"cpu": "1500m"}, "requests": {"memory": "64Mi"}}}
    assert environment.resource_field(container, reference, {"memory": "8Gi"}) == expected


def test_variables_come_in_order_and_later_ones_win() -> None:
    container = {
        "envFrom": [{"prefix": "C_", "configMapRef": {"name": "c"}}, {"secretRef": {"name": "none", "optional": True}}],
        "env": [
            {"name": "C_a", "value": "mine"},
            {"name": "B", "value": "$(C_a)-$(C_b)-$(LATER)"},
            {"name": "LATER", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "ABSENT", "valueFrom": {"secretKeyRef": {"name": "s", "key": "x", "optional": True}}},
        ],
    }
    tables = {("configmaps", "c"): {"a": "1", "b": "2"}, ("secrets", "s"): {"k": "v"}, ("secrets", "none"): None}
    found = environment.variables(container, tables, str, str)
    assert found == {"C_a": "mine", "C_b": "2", "B": "mine-2-$(LATER)", "LATER": "v"}


@pytest.mark.parametrize(("table", "words"), [(None, 'secret "s" not found'), ({}, 'secret "s" has no key k')])
def test_a_missing_reference_is_named(table: dict[str, str] | None, words: str) -> None:
    container = {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}
    with pytest.raises(MissingReference, match=words):
        environment.variables(container, {("secrets", "s"): table}, str, str)


@pytest.mark.parametrize(
    ("image", "name"),
    [("a", "a"), ("r.example:5000/t/a:1", "a"), ("t/a@sha256:0123", "a"), ("r.example/a:1@sha256:0123", "a")],
)
def test_image_names(image: str, name: str) -> None:
    assert environment.image_name(image) == name


def test_a_verdict_needs_enough_equal_outcomes_in_a_row() -> None:
    verdict = Verdict({"successThreshold": 2, "failureThreshold": 3})
    outcomes = [True, True, False, False, True, False, False, False, False]
    assert [verdict.add(outcome) for outcome in outcomes] == [None, True, None, None, None, None, None, False, False]


def _view(**fields: Any) -> View:
    return View("c", "i", **fields)


DONE: dict[str, Any] = {"state": {"terminated": {"exitCode": 0}}, "over": True}
FAILED: dict[str, Any] = {"state": {"terminated": {"exitCode": 1}}, "over": True}
RUNS: dict[str, Any] = {"state": {"running": {}}}
CREATING: dict[str, Any] = {"state": {"waiting": {}}}
CRASHED: dict[str, Any] = {"state": {"waiting": {}}, "last": {"terminated": {"exitCode": 1}}}


@pytest.mark.parametrize(
    ("init", "containers", "always", "expected"),
    [
        ([], [RUNS], True, "Running"),
        ([], [RUNS, CREATING], True, "Pending"),
        ([], [RUNS, CRASHED], True, "Running"),
        ([], [CRASHED], True, "Running"),
        ([RUNS], [CREATING], True, "Pending"),
        ([CRASHED], [CREATING], True, "Pending"),
        ([FAILED], [CREATING], False, "Failed"),
        ([DONE], [RUNS], True, "Running"),
        ([], [DONE, DONE], False, "Succeeded"),
        ([], [DONE, FAILED], False, "Failed"),
        ([], [DONE, RUNS], False, "Running"),
        ([], [DONE], True, "Running"),
    ],
)
def test_phases(init: list[dict[str, Any]], containers: list[dict[str, Any]], always: bool, expected: str) -> None:
    assert phase([_view(**v) for v in init], [_view(**v) for v in containers], always) == expected
