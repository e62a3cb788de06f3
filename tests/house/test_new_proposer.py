"""A new proposer is one file of the engine and one row of the contract's table: nothing in the operator, no list."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
ROW = '''
METHODS += (Method("ORACLE", "asks what it knows", "needed", trees=False, preference=5),)
'''
MODULE = '''
"""Drafts of a method that this test alone knows."""
from pilotfish_engine.contract.methods import Limit, Limits


def recognises(models):
    return models.draft is not None and models.draft.name == "oracle"


def check(models):
    return Limits(num_steps=Limit(3, "an oracle sees three tokens"))
'''
ENGINE_SAYS = '''
import sys
from pathlib import Path
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.speculation import registry
from pilotfish_engine.speculation.proposer import Models

models = Models(Path("target"), None, Path("oracle"), lambda path, size: None)
method = registry.resolve("Auto", models)
limits = registry.judge(method, models)
print(method.name, registry.names()[-1])
print(limits.misfit(Envelope(num_steps=3)))
print(limits.misfit(Envelope(num_steps=4)).sentence)
print(limits.misfit(Envelope(num_steps=3, topk=2)).sentence)
registry.check("ORACLE", None)
'''


def test_the_operator_the_registry_and_the_command_line_know_it(tmp_path: Path) -> None:
    for folder in ("engine", "operator"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    engine = tmp_path / "engine/pilotfish_engine"
    with (engine / "contract/methods.py").open("a") as table:
        table.write(ROW)
    (engine / "speculation/oracle.py").write_text(MODULE)
    paths = {"PYTHONPATH": f"{tmp_path}/engine:{tmp_path}/operator", "PATH": os.environ["PATH"]}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], env=paths, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    said = run("-c", ENGINE_SAYS)
    assert said.stdout.splitlines() == [
        "ORACLE ORACLE",
        "None",
        "num_steps is 4, but an oracle sees three tokens; at most 3 would work",
        "topk is 2, but ORACLE drafts chains; at most 1 would work",
    ]
    assert "method ORACLE needs a draft model, and none is given" in said.stderr

    made = run("-m", "pilotfish_operator.crd", str(tmp_path))
    assert made.returncode == 0, made.stderr
    [path] = tmp_path.glob("*.yaml")
    schema = yaml.safe_load(path.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    speculation = schema["properties"]["spec"]["properties"]["speculation"]
    assert "ORACLE" in speculation["properties"]["method"]["enum"]
    assert "ORACLE (asks what it knows)" in speculation["properties"]["method"]["description"]
    [needs, forbids] = [entry["rule"] for entry in speculation["x-kubernetes-validations"]]
    assert "'ORACLE'" in needs
    assert "'ORACLE'" not in forbids

    refused = run("-m", "pilotfish_engine.cli", "serve", "m", "--method", "ORACLE")
    assert refused.returncode == 2
    assert "method ORACLE needs a draft model" in refused.stderr
