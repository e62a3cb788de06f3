"""The public compliance suite llm-comply, of OpenAI's chat completions and of Open Responses: a scenario is a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from llm_comply.tests import get_tests
from scenario import MODEL, URL, main, scenario

FORMATS = ("openai-chat", "open-responses")
# Pictures are refused by name: models of text.
REFUSED = ("chat-image-input", "image-input")


def run(form: str, test: str) -> None:
    command = [
        str(Path(sys.executable).with_name("llm-comply")), "--format", form, "--base-url", URL, "--api-key", "none",
        "--model", MODEL, "--filter", test, "--timeout", "300", "--json",
    ]  # fmt: skip
    (result,) = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=400).stdout)["results"]
    wrong = result.get("errors") or []
    if test in REFUSED:
        assert any("HTTP 400" in text for text in wrong), result
    elif result["status"] != "skipped":
        assert result["status"] == "passed", wrong
    if result.get("warnings"):
        sys.stderr.write(f"{form} {test}: {result['warnings']}\n")


def add(form: str, test: str) -> None:
    def ran() -> None:
        run(form, test)

    ran.__name__ = f"{form} {test}" + (" (refused by name)" if test in REFUSED else "")
    scenario(ran)


for _form in FORMATS:
    for _case in get_tests(_form):
        add(_form, _case.id)


if __name__ == "__main__":
    main()
