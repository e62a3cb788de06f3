"""What people do with guidellm: runs of synthetic requests against chat, completions and responses."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scenario import MODEL, ROOT, TOKENIZER, main, scenario


def run(path: str, *arguments: str, streamed: bool = True) -> None:
    """Every request of a run must have succeeded, and told what it used."""
    folder = Path(tempfile.mkdtemp(prefix="guidellm-"))
    backend = {
        "kind": "openai_http", "target": ROOT, "model": MODEL, "request_format": path, "stream": streamed,
    }  # fmt: skip
    data = {"kind": "synthetic_text", "prompt_tokens": 24, "output_tokens": 6}
    tokenizer = {"kind": "huggingface_auto", "model": TOKENIZER}
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
        "--backend", json.dumps(backend), "--data", json.dumps(data), "--tokenizer", json.dumps(tokenizer),
        "--constraint", json.dumps({"kind": "max_requests", "count": 3}),
        "--output", json.dumps({"kind": "json", "path": str(folder / "report.json")}), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stderr or done.stdout)[-1500:]
    (benchmark,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], str(requests["errored"][0])[:600]
    assert len(requests["successful"]) == 3
    assert all(request["output_metrics"]["text_tokens"] for request in requests["successful"])


@scenario
def chat_one_by_one() -> None:
    run("/v1/chat/completions", "--profile", '{"kind": "synchronous"}')


@scenario
def chat_at_once() -> None:
    run("/v1/chat/completions", "--profile", '{"kind": "concurrent", "streams": 2}')


@scenario
def chat_whole() -> None:
    run("/v1/chat/completions", "--profile", '{"kind": "synchronous"}', streamed=False)


@scenario
def completions() -> None:
    run("/v1/completions", "--profile", '{"kind": "synchronous"}')


@scenario
def responses() -> None:
    run("/v1/responses", "--profile", '{"kind": "synchronous"}')


if __name__ == "__main__":
    main()
