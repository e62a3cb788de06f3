"""Runs over the tiny target, here and as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from pilotfish_engine.train.settings import TrainSettings
from tests.engine.server.serving import ROOT, wait_until

SEED_AND_SIZE = ("--draft-vocab", "30", "--draft-steps", "5", "--held-out", "4", "--batch-tokens", "128",
                 "--max-length", "48", "--answer-tokens", "24", "--epochs", "4", "--seed", "3")  # fmt: skip
START_SECONDS = 240  # two processes that import torch, on a busy machine


def settings(target: Path, data: Path, out: Path, **fields: object) -> TrainSettings:
    chosen = TrainSettings(
        target=str(target), data=str(data), out=str(out), draft_vocab=30, draft_steps=5, epochs=4, batch_tokens=128,
        max_length=48,
        answer_tokens=24, learning_rate=5e-4, held_out=4, seed=3, dtype="float32",
    )  # fmt: skip
    return replace(chosen, **fields)  # type: ignore[arg-type]


def started(target: Path, data: Path, out: Path, *flags: str, errors: IO[str] | None = None) -> subprocess.Popen[bytes]:
    """`settings` as a command; flags win."""
    command = [sys.executable, "-m", "pilotfish_engine.cli", "train-draft", str(target), "--data", str(data)]
    command += ["--out", str(out), *SEED_AND_SIZE, "--dtype", "float32", *flags]
    variables = {"PYTHONPATH": f"{ROOT}/engine", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(command, env=os.environ | variables, stderr=errors)


def curve(out: Path) -> list[dict[str, float]]:
    return json.loads((out / "training/curve.json").read_text())


def wait_for_points(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    """Of the curve, which is written behind the state."""

    def there() -> bool:
        assert process.poll() is None, "it ended before"
        return (out / "training/curve.json").exists() and len(curve(out)) >= count

    wait_until(there, START_SECONDS)
