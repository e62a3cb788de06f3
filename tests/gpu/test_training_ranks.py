"""Two ranks train the head of one, over NCCL; answers are given, as float sums may choose another word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.train.conftest import prompts_file, target_folder, whole  # noqa: F401 (fixtures)
from tests.engine.train.runs import START_SECONDS, started
from tests.engine.train.test_ranks import (  # noqa: F401
    test_a_rank_that_ends_ends_the_run,
    test_two_ranks_train_the_head_of_one,
    test_what_rank_0_refuses_ends_the_others,
)


@pytest.fixture(scope="module")
def together(
    whole: Path,  # noqa: F811
    target_folder: Path,  # noqa: F811
    prompts_file: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("together")
    (out / "training").mkdir()
    for name in ("answers.jsonl", "run.json"):
        (out / "training" / name).write_bytes((whole / "training" / name).read_bytes())
    process = started(target_folder, prompts_file, out, "--ranks", "2")
    assert process.wait(START_SECONDS) == 0
    return out
