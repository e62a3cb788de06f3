"""Each rule of the house fails on a planted breach, and says what is wrong and where."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ENGINE = "engine/pilotfish_engine"
OPERATOR = "operator/pilotfish_operator"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources and of the tools' configuration, to break."""
    for folder in ("engine", "operator", "tests/house"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(tree: Path, path: str, text: str) -> None:
    """Append to a module, or make it."""
    file = tree / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(text)


def run(tree: Path, *command: str | Path) -> tuple[int, str]:
    paths = f"{tree / 'engine'}:{tree / 'operator'}"
    done = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, env={"PYTHONPATH": paths, "PATH": str(BIN)}, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


EIGHT = "(a, b, *, c, d, e, f, g, **h)"
EIGHT_MORE = "(self, a, b, c, d, e, f, g, h)"
FIELDS = "".join(f"    f{number}: int\n" for number in range(15))
KEPT = "".join(f"        self.a{number}, self.b{number} = 1, 2\n" for number in range(8))
WORDY = "Says" + " much" * 15
LONG_FUNCTION = "\n\ndef long() -> int:\n" + "    x = 1\n" * 60 + "    return x\n"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (f"{ENGINE}/planted.py", '"""Doc."""\n' * 401, "planted.py: 401 lines; at most 400"),
        (f"{ENGINE}/planted.py", '"""Doc."""' + LONG_FUNCTION, "planted.py:3: long has 62 lines; at most 60"),
        (
            f"{ENGINE}/planted.py",
            f'"""Doc."""\ndef many{EIGHT}: ...\n',
            "planted.py:2: many has 8 parameters; at most 7",
        ),
        (f"{ENGINE}/planted.py", f'"""Doc."""\nclass A:\n    def many{EIGHT_MORE}: ...\n', "many has 8 parameters"),
        (f"{ENGINE}/planted.py", f'"""Doc."""\nclass Bag:\n{FIELDS}', "Bag declares 15 attributes; at most 14"),
        (f"{ENGINE}/planted.py", f'"""Doc."""\nclass Bag:\n    def f(self):\n{KEPT}', "Bag declares 16 attributes"),
        (f"{ENGINE}/kv/utils.py", '"""Doc."""\n', "'utils' says nothing"),
        (f"{ENGINE}/kv/page_helpers.py", '"""Doc."""\n', "'page_helpers' says nothing"),
        (f"{OPERATOR}/plan_v2.py", '"""Doc."""\n', "'plan_v2' says nothing"),
        (f"{OPERATOR}/common/scale.py", '"""Doc."""\n', "'common' says nothing"),
        (f"{ENGINE}/planted.py", "x = 1\n", "planted.py: no module docstring"),
        (f"{ENGINE}/planted.py", f'"""{WORDY}: in words."""\n', "described in a first sentence of 16 words"),
        (f"{ENGINE}/planted.py", f'"""Doc."""\ndef f():\n    """{WORDY}."""\n', "planted.py:2: f is described"),
        ("operator/__init__.py", "", "operator/__init__.py must not exist"),
        ("engine/__init__.py", "", "engine/__init__.py must not exist"),
        (f"{OPERATOR}/plan.py", "\nopen('x')\n", "open() in the functional core"),
        (f"{ENGINE}/kv/pages.py", "\nprint('x')\n", "print() in the functional core"),
        (f"{OPERATOR}/status.py", "\nimport datetime\ndatetime.datetime.now()\n", ".now() in the functional core"),
        (f"{ENGINE}/scheduler/loop.py", '"""Doc."""\ndef is_eagle() -> None: ...\n', "'is_eagle' names a method"),
        (f"{OPERATOR}/plan.py", "\nx = 'MTP'\n", "'MTP' names a method"),
        (f"{ENGINE}/worker/pick.py", '"""Doc."""\nx = {"method": "NGRAM"}\n', "'NGRAM' names a method"),
        (f"{ENGINE}/server/pick.py", '"""Doc."""\nfrom ..speculation.mtp import f\n', "'speculation.mtp' names a"),
    ],
)
def test_rules_of_the_house(tree: Path, path: str, text: str, message: str) -> None:
    plant(tree, path, text)
    code, output = run(tree, sys.executable, "tests/house/rules.py")
    assert code == 1
    assert message in output


CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
ENGINE_LAYERS, OPERATOR_LAYERS = "The engine's layers", "The operator's layers"
BREACHES = [
    (f"{OPERATOR}/plan.py", "import time", "Functional core"),
    (f"{OPERATOR}/autoscale.py", "import random", "Functional core"),
    (f"{OPERATOR}/tune.py", "from pathlib import Path", "Functional core"),
    (f"{OPERATOR}/objects.py", "import os", "Functional core"),
    (f"{OPERATOR}/status.py", "from pilotfish_operator import kube", "Functional core"),
    (f"{ENGINE}/kv/pages.py", "import torch", "Functional core"),
    (f"{ENGINE}/kv/prefix.py", "import time", "Functional core"),
    (f"{ENGINE}/scheduler/policy.py", "import asyncio", "Functional core"),
    (f"{ENGINE}/contract/goodput.py", "import time", "Functional core"),
    (f"{ENGINE}/contract/goodput.py", "import numpy", "The contract imports neither torch nor numpy"),
    (f"{ENGINE}/contract/goodput.py", "from pilotfish_engine.worker import target", "The contract imports neither"),
    (f"{OPERATOR}/engines.py", "import pilotfish_engine.config", "nothing of the engine but the contract"),
    (f"{ENGINE}/config.py", "import pilotfish_operator.api", "nothing of the operator"),
    (f"{ENGINE}/scheduler/policy.py", "import torch", "The scheduler imports no torch"),
    (f"{OPERATOR}/observe.py", "import kopf", "Only the watcher imports kopf"),
    (f"{OPERATOR}/apply.py", "from kubernetes.aio import client", "Only kube imports the Kubernetes client"),
    (f"{ENGINE}/worker/target.py", "import flashinfer", "Only kernels import flashinfer"),
    (f"{ENGINE}/kernels/inputs.py", "from pilotfish_engine.model import inputs", ENGINE_LAYERS),
    (f"{ENGINE}/model/rope.py", "from pilotfish_engine.batch import state", ENGINE_LAYERS),
    (f"{ENGINE}/batch/passes.py", "from pilotfish_engine.speculation import tree", ENGINE_LAYERS),
    (f"{ENGINE}/speculation/verify.py", "from pilotfish_engine.worker import target", ENGINE_LAYERS),
    (f"{ENGINE}/scheduler/policy.py", "from pilotfish_engine.worker import profile", ENGINE_LAYERS),
    (f"{ENGINE}/group.py", "from pilotfish_engine import core", ENGINE_LAYERS),
    (f"{ENGINE}/planted.py", '"""Doc."""', ENGINE_LAYERS),
    (f"{OPERATOR}/plan.py", "from pilotfish_operator import reconcile", OPERATOR_LAYERS),
    (f"{OPERATOR}/planted.py", '"""Doc."""', OPERATOR_LAYERS),
    (f"{ENGINE}/model/rope.py", "from pilotfish_engine.model import assembly", "No import cycle"),
    (f"{OPERATOR}/kinds.py", "from pilotfish_operator import plan", "No import cycle"),
]


@pytest.mark.parametrize(("path", "text", "contract"), BREACHES)
def test_imports(tree: Path, path: str, text: str, contract: str) -> None:
    plant(tree, path, f"\n{text}\n")
    code, output = run(tree, BIN / "lint-imports", "--no-cache")
    assert code == 1
    broken = output.partition("Broken contracts")[2]
    assert contract in broken, output
    assert Path(path).stem in broken


def test_every_contract_fails_on_a_planted_breach_and_the_layers_know_no_exception() -> None:
    for contract in CONTRACTS:
        assert any(named in contract["name"] for _, _, named in BREACHES), contract["name"]
        assert contract["type"] == "forbidden" or "ignore_imports" not in contract


@pytest.mark.parametrize("text", ["import os\nx = os.environ['A']\n", "import os\nx = os.getenv('A')\n"])
def test_one_reader_of_the_environment(tree: Path, text: str) -> None:
    plant(tree, f"{ENGINE}/server/planted.py", f'"""Doc."""\n{text}')
    plant(tree, f"{OPERATOR}/planted.py", f'"""Doc."""\n{text}')
    code, output = run(tree, BIN / "ruff", "check", "--no-cache", "--output-format=concise", "engine", "operator")
    assert code == 1
    for path in (f"{ENGINE}/server/planted.py", f"{OPERATOR}/planted.py"):
        assert f"{path}:3:5: TID251" in output
    assert "config.py" not in output


def test_types_are_strict(tree: Path) -> None:
    plant(tree, f"{ENGINE}/planted.py", '"""Doc."""\ndef f(x): return x\n')
    code, output = run(tree, BIN / "mypy", "--cache-dir", tree / "cache", f"{ENGINE}/planted.py")
    assert code == 1
    assert "planted.py:2: error: Function is missing a type annotation" in output


@pytest.mark.parametrize("module", ["pilotfish_operator.handlers", "pilotfish_engine.contract.goodput"])
def test_the_operator_runs_where_torch_is_not_installed(module: str) -> None:
    """The import contracts see what is written; this sees what is loaded."""
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'transformers'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_every_source_is_within_reach_of_the_rules() -> None:
    """A new folder of Python at the root must be added to the checks, not slip past them."""
    rules = ast.literal_eval(
        next(
            node.value
            for node in ast.parse((ROOT / "tests/house/rules.py").read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SOURCE_FOLDERS"
        )
    )
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {line.split("/")[0] for line in listed.splitlines() if "/" in line}
    assert folders <= set(rules)
    makefile = (ROOT / "Makefile").read_text()
    assert f"TYPED := {' '.join(rules)}" in makefile


TOP = {
    "pyproject.toml", "operator", "engine", "charts", "crds", "tests", "Dockerfile",
    "docs", "examples", "benchmarks", "README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md",
    "Makefile", "requirements", "setup.py",  # docs/decisions.md says why each of these stays
}  # fmt: skip


def test_the_top_level_is_the_house() -> None:
    """What a stranger sees first. Configuration of tools that looks for its place here begins with a dot."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {line.split("/")[0] for line in listed.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP
    decisions = (ROOT / "docs/decisions.md").read_text()
    assert all(f"`{name}`" in decisions for name in ("Makefile", "requirements/", "setup.py"))
