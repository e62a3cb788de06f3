"""docs/architecture.md draws the layers as they are, and no text names a file that is not there."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
SOURCES = ("", "engine/pilotfish_engine/", "engine/pilotfish_engine/model/", "engine/pilotfish_engine/speculation/")
TO_COME = {"speculation/<name>.py", "gateway/pilotfish_gateway"}


@pytest.mark.parametrize("contract", [one for one in CONTRACTS if one["type"] == "layers"], ids=lambda one: one["id"])
def test_the_drawing_is_the_contract(contract: dict[str, list[str]]) -> None:
    drawing = re.search(rf"<!-- {contract['id']} -->\n```\n(.*?)\n```", PAGE, re.DOTALL)
    assert drawing
    for line, layer in zip(drawing[1].splitlines(), contract["layers"], strict=True):
        names, words = line.split("  ", 1)
        assert names == layer
        assert words.strip()


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`([\w.][\w./<>-]*(?:/[\w<>-]+|\.py))`", PAGE)) - TO_COME
    assert len(named) > 15
    for name in named:
        places = [ROOT / source / name for source in (*SOURCES, "operator/pilotfish_operator/")]
        places += [place.with_suffix(".py") for place in places]
        assert any(place.exists() for place in places), name


FOLDERS = "tests|docs|engine|operator|benchmarks|examples|charts|crds|requirements"
OURS = re.compile(rf"(?<![\w/])(?:{FOLDERS})/[\w./-]*\w(?![\w*])")


def test_no_text_cites_what_is_not_in_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = [name for name in listed.splitlines() if re.search(r"\.(md|py|toml)$|(^|/)(Makefile|Dockerfile)$", name)]
    for name in texts:
        if name.startswith("tests/house/") or not (ROOT / name).exists():
            continue
        for cited in set(OURS.findall((ROOT / name).read_text(encoding="utf-8"))):
            places = [ROOT / cited, ROOT / f"{cited}.py", (ROOT / name).parent / cited]
            assert any(place.exists() for place in places), f"{name} cites {cited}"


def test_the_readme_leads_there() -> None:
    assert "(docs/architecture.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
