from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish_engine.train.run import train
from tests.engine.train.runs import settings
from tests.engine.train.tiny import write_prompts, write_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", count=14)


@pytest.fixture(scope="session")
def whole(target_folder: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, without a break."""
    return train(settings(target_folder, prompts_file, tmp_path_factory.mktemp("whole") / "head"))
