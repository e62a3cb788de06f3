"""`pilotfish plan | explain | record | replay`: the operator's own functions, printed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pilotfish_operator import cli, record
from tests.operator.live import MODEL, Kubelet, OperatorProcess, Space, eventually

KINDS = ("ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget", "Deployment", "Secret")
MANIFEST = {"apiVersion": "pilotfish.dev/v1alpha1", "kind": "SpeculativeModel", "metadata": {"name": "fish"}}


def write(path: Path, spec: object) -> str:
    path.write_text(yaml.safe_dump(MANIFEST | {"spec": spec}))
    return str(path)


def test_plan_prints_objects_and_the_bill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"model": {"source": MODEL}, "engine": {"tensorParallelSize": 4}, "autoscaling": {"maxReplicas": 3}}
    cli.main(["plan", "-f", write(tmp_path / "m.yaml", spec)])
    text = capsys.readouterr().out
    kinds = [document["kind"] for document in yaml.safe_load_all(text)]
    assert sorted(kinds) == sorted([*KINDS, "ConfigMap"])  # one ConfigMap keeps the template
    assert kinds[-2:] == ["Deployment", "Secret"]
    assert text.splitlines()[-1] == "# fish: 1 to 3 replicas of 4 x nvidia.com/gpu: 4 to 12 in all"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"model": {}}, "fish: spec.model.source: Field required"),
        ({"model": {"source": MODEL, "revision": "main"}}, "spec.model.revision 'main' has no meaning beside"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: object, sentence: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "-f", write(tmp_path / "m.yaml", spec)])
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_explain_record_and_live_plan_on_a_cluster(
    space: Space,
    operator: Callable[..., OperatorProcess],
    kubelet: Kubelet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    operator("--record", str(tmp_path / "decisions"))
    space.apply("fish")
    eventually(lambda: space.condition("fish", "SpeculationActive")[0] == "True", "serves")
    monkeypatch.setenv("KUBECONFIG", str(space.cluster.kubeconfig))
    cli.main(["explain", "fish", "-n", space.name, "--seconds", "2"])
    text = capsys.readouterr().out
    assert "1 running" in text or "0 running" in text
    assert "Chose " in text
    cli.main(["top", "-n", space.name])
    assert f"{space.name}/fish" in capsys.readouterr().out
    cli.main(["record", "fish", "-n", space.name, "--seconds", "2"])
    recorded = capsys.readouterr().out
    found = list(record.read(io.StringIO(recorded)))
    assert found
    assert list(cli.replay(found)) == [f"{len(found)} decisions, 0 of which would be others today"]
    manifest = tmp_path / "live.yaml"
    base = {"model": {"source": MODEL}, "resources": {"accelerator": "None"}}
    cli.main(["replay", str(tmp_path / "decisions")])
    assert "decisions, 0 of which would be others today" in capsys.readouterr().out
    for spec, verdict in (
        (base, "pods are not restarted"),
        (base | {"engine": {"pageSize": 4}}, "every pod is replaced"),
    ):
        body = MANIFEST | {"metadata": {"name": "fish", "namespace": space.name}, "spec": spec}
        manifest.write_text(yaml.safe_dump(body))
        cli.main(["plan", "--live", "-f", str(manifest)])
        assert verdict in capsys.readouterr().out
