"""A run against a server, for every test of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotfish_engine.bench.result import LevelResult, Result, read
from pilotfish_engine.bench.run import bench
from pilotfish_engine.cli import parse
from tests.engine.bench.openai_server import OpenAIServer
from tests.engine.server.conftest import served as served

FAST = ("--warm-up", "0", "--output-len", "3", "--input-len", "5", "--api", "chat")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, Result]]:
    """A run against a server: the exit code and the --json file."""
    numbers = itertools.count()

    def run(server: OpenAIServer, *flags: str) -> tuple[int, Result]:
        file = tmp_path / f"{next(numbers)}.json"
        code = bench(parse(["bench", "--url", server.url, "--json", str(file), *flags]))
        return code, read(file)

    return run


def only(result: Result) -> LevelResult:
    (level,) = result.levels
    return level
