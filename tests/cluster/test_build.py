"""The build: what is missing, once, whole or not at all. A Go module of one file stands in for the large ones."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from tests.cluster import build
from tests.cluster.errors import BuildError


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "modules" / "hello"
    folder.mkdir(parents=True)
    (folder / "go.mod").write_text("module hello\n\ngo 1.26\n")
    (folder / "main.go").write_text('package main\n\nimport "os"\n\nfunc main() { os.Stdout.WriteString("hello") }\n')
    monkeypatch.setattr(build, "MODULES", tmp_path / "modules")
    monkeypatch.setattr(build, "TARGETS", {"hello": build.Target("hello", ".")})
    monkeypatch.setattr(build, "linker_flags", lambda: "-s")
    monkeypatch.setattr(build, "binaries_folder", lambda: tmp_path / "bin")
    return folder


def test_two_builds_at_once_compile_once(module: Path, capfd: pytest.CaptureFixture[str]) -> None:
    threads = [threading.Thread(target=build.build, args=(["hello"],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capfd.readouterr().err.count("hello: compiling") == 1
    folder = build.build(["hello"])
    assert capfd.readouterr().err == ""
    assert subprocess.check_output([folder / "hello"]) == b"hello"
    assert [path.name for path in folder.iterdir()] == ["hello"]


def test_a_failure_shows_the_compilers_words_and_leaves_nothing(module: Path, tmp_path: Path) -> None:
    (module / "main.go").write_text("package main\n\nfunc main() { undefined() }\n")
    with pytest.raises(BuildError, match="undefined: undefined"):
        build.build(["hello"])
    assert list((tmp_path / "bin").iterdir()) == []


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BuildError, match="unknown binary kubelt; there are etcd, kube-apiserver"):
        build.build(["kubelt"])


def test_other_pins_have_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.binaries_folder()
    monkeypatch.setattr(build, "linker_flags", lambda: "-s -w other")
    assert build.binaries_folder() != before
