"""The command line, as a person types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster import processes
from tests.cluster.cluster import REPOSITORY


def sandbox(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, "-m", "tests.cluster", *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)


def test_up_env_status_down(tmp_path: Path) -> None:
    state = str(tmp_path / "a world")  # a space, since people have them
    Path(state).mkdir()
    Path(state, "world.json").write_text("{}")  # as after a power cut: a world is recorded, and nothing runs
    try:
        up = sandbox("up", "control", "--state", state)
        assert (up.returncode, up.stderr) == (0, "")
        again = sandbox("up", "control", "--state", state)
        assert again.returncode == 2
        assert f"already up in {state}: python -m tests.cluster down" in again.stderr
        exports = sandbox("env", "--state", state).stdout
        script = f"{exports}\nkubectl get namespace default -o name && helm list"
        shell = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, timeout=30)
        assert shell.stdout.startswith("namespace/default\n"), shell.stderr
        status = sandbox("status", "--state", state).stdout
        assert status.count("runs as process") == 5
        assert str(Path(state, "logs", "etcd.log")) in status
        assert Path(sandbox("kubeconfig", "--state", state).stdout.strip()).is_file()
    finally:
        assert sandbox("down", "--state", state).stdout == "down\n"
    assert not processes.marked(processes.world_mark(Path(state)))
    assert [path.name for path in Path(state).iterdir()] == ["logs"]


def test_without_a_world_a_sentence_says_how_to_make_one(tmp_path: Path) -> None:
    for command in ("status", "env", "kubeconfig"):
        result = sandbox(command, "--state", str(tmp_path))
        assert result.returncode == 2
        assert result.stderr == (
            f"sandbox: no world is up in {tmp_path}: python -m tests.cluster up control --state {tmp_path}\n"
        )
    assert sandbox("down", "--state", str(tmp_path)).stdout == "down\n"
