"""What people do with lm-eval: local-completions (generation with five stops, log-likelihoods) and chat."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
from scenario import MODEL, TOKENIZER, URL, main, scenario

FOLDER = Path(tempfile.mkdtemp(prefix="lm-eval-"))
QUESTIONS = [
    {"question": "The capital of Italy is", "answer": " Rome", "choices": [" Rome", " Oslo", " far"], "right": 0},
    {"question": "One, two, three,", "answer": " four", "choices": [" four", " blue"], "right": 0},
    {"question": "Überraschung: 日本", "answer": "語", "choices": ["語", " 🙂"], "right": 0},
]  # fmt: skip
DATA = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
GENERATE = """
task: five_stops
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n\\n", "Question:", "</s>", "<|im_end|>", "Answer:"]
  max_gen_toks: 12
  do_sample: false
  temperature: 0
metric_list: [{metric: exact_match}]
"""
CHOOSE = """
task: choices
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
"""
ROLL = """
task: perplexity
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
"""


def tasks() -> Any:
    data = FOLDER / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for text in (GENERATE, CHOOSE, ROLL):
        name = text.split()[1]
        described = DATA.format(data=data)
        if name == "perplexity":
            described = described.replace('doc_to_text: "{{question}}"', 'doc_to_text: ""')
        (FOLDER / f"{name}.yaml").write_text(described + text)
    return lm_eval.tasks.TaskManager(include_path=str(FOLDER), include_defaults=False)


def evaluate(model: str, task: str, path: str, batch_size: int = 1, **settings: Any) -> Any:
    arguments = {
        "model": MODEL, "base_url": URL + path, "num_concurrent": 1, "max_retries": 1, "max_length": 2048,
        "tokenizer": TOKENIZER, "timeout": 120,
    } | settings  # fmt: skip
    return lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[task], task_manager=tasks(), batch_size=batch_size,
        apply_chat_template=model == "local-chat-completions", bootstrap_iters=0, log_samples=True,
    )  # fmt: skip


def answers(result: Any, task: str) -> list[Any]:
    return [sample["resps"] for sample in result["samples"][task]]


@scenario
def five_stops() -> None:
    for backend in ("huggingface", "none"):
        tokenized = backend == "huggingface"
        result = evaluate(
            "local-completions", "five_stops", "/completions", tokenizer_backend=backend, tokenized_requests=tokenized
        )
        assert len(answers(result, "five_stops")) == len(QUESTIONS)


@scenario
def five_stops_at_once() -> None:
    result = evaluate(
        "local-completions", "five_stops", "/completions", tokenizer_backend="huggingface", num_concurrent=3
    )
    assert len(answers(result, "five_stops")) == len(QUESTIONS)


@scenario
def log_likelihoods() -> None:
    for batch in (1, 4):
        result = evaluate(
            "local-completions", "choices", "/completions", tokenizer_backend="huggingface", batch_size=batch
        )
        told = [float(choice[0][0]) for question in answers(result, "choices") for choice in question]
        assert len(told) == 7
        assert all(math.isfinite(value) and value < 0 for value in told), told


@scenario
def rolling_log_likelihoods() -> None:
    result = evaluate("local-completions", "perplexity", "/completions", tokenizer_backend="huggingface")
    assert result["results"]["perplexity"]["word_perplexity,none"] > 1


@scenario
def chat() -> None:
    result = evaluate("local-chat-completions", "five_stops", "/chat/completions")
    assert len(answers(result, "five_stops")) == len(QUESTIONS)


if __name__ == "__main__":
    main()
