from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.server.serving import Engine, engine

ADMIN_TOKEN = "an-admin-token"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for every test that leaves it as it was."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "admin").write_text(ADMIN_TOKEN + "\n")
    flags = ("--max-model-len", "512", "--max-running-requests", "4", "--admin-token-file", f"{folder}/admin")
    with engine(folder, *flags) as started:
        yield started


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """Where an engine keeps what it needs while it runs: empty again afterwards, or the test fails."""
    folder = tmp_path / "engine"
    folder.mkdir()
    return folder
