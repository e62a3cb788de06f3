"""Each package declares what it imports and nothing else, so that an engine has no kopf and an operator no torch."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PART_OF = {"pydantic_core": "pydantic"}  # which pydantic's own documentation imports from
PROVIDES = packages_distributions()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    entries = [*PROJECT["dependencies"], *(entry for extra in extras for entry in EXTRAS[extra])]
    return {canonical(re.split(r"[\s<>=!~;\[]", entry)[0]) for entry in entries}


def imported(package: Path) -> Iterator[tuple[str, str]]:
    """(top-level module, where) of every import of something that is neither Python's nor ours."""
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in {name.partition(".")[0] for name in names}:
                if name not in sys.stdlib_module_names and not name.startswith("pilotfish_"):
                    yield name, f"{path.name}:{node.lineno}"


def distributions(module: str) -> set[str]:
    """Those that bring the module; for one that is not installed here, its own name."""
    name = PART_OF.get(module, module)
    return {canonical(found) for found in PROVIDES.get(name, [name])}


@pytest.mark.parametrize(
    ("package", "extras"),
    [("operator/pilotfish_operator", ("operator", "train")), ("engine/pilotfish_engine", ("engine", "cuda", "train"))],
)
def test_what_is_imported_is_what_is_declared(package: str, extras: tuple[str, ...]) -> None:
    wanted, used = declared(*extras), set[str]()
    for module, where in imported(ROOT / package):
        found = distributions(module)
        assert found & wanted, f"{where} imports {module}: declare {' or '.join(found)} in pyproject's {extras[0]}"
        used |= found
    spare = declared(extras[0]) - used
    assert not spare, f"declared in pyproject's {extras[0]} and imported nowhere: {', '.join(sorted(spare))}"


def test_the_contract_needs_what_every_install_has() -> None:
    """It is what the operator imports of the engine."""
    needed = {name for name, _ in imported(ROOT / "engine/pilotfish_engine/contract")}
    assert all(distributions(name) & declared() for name in needed), needed


@pytest.mark.parametrize(
    ("pins", "absent"),
    [
        ("operator", {"torch", "numpy", "triton", "transformers", "fastapi", "tokenizers"}),
        ("engine", {"kopf", "kubernetes", "transformers", "pytest"}),
        ("cuda", {"kopf", "kubernetes", "transformers", "pytest"}),
    ],
)
def test_an_environment_has_nothing_of_the_other_half(pins: str, absent: set[str]) -> None:
    text = (ROOT / f"requirements/{pins}.txt").read_text()
    pinned = {canonical(name) for name in re.findall(r"^([\w.-]+)==", text, re.M)}
    extras = {"cuda": ("engine", "cuda")}.get(pins, (pins,))
    assert declared(*extras) <= pinned, "make lock"
    assert not pinned & absent
