"""The chart through the pinned helm, and a real API server to install it into."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import build
from tests.cluster.cluster import Cluster

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/pilotfish"
Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]


@pytest.fixture(scope="session")
def helm() -> Path:
    return build.build(["helm"]) / "helm"


@pytest.fixture(scope="session")
def render(helm: Path) -> Render:
    """render(**values) → the manifests that `helm template` makes. Raises CalledProcessError with helm's words."""

    def call(**values: Any) -> list[Manifest]:
        sets = [f"--set-json={key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]
        argv: list[str | Path] = [helm, "template", "fish", CHART, "--namespace=pf", *sets]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
        return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]

    return call


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.start("control", tmp_path_factory.mktemp("control") / "state") as world:
        yield world
