"""Answers that are written out, over a tokenizer that begins a text with a space."""

from __future__ import annotations

import json
from pathlib import Path

from pilotfish_engine.tokenizer import load
from pilotfish_engine.train.prompts import read_prompts
from tests.engine.tokenizer.families import save_folder


def test_an_answer_goes_on_where_its_prompt_ends(tmp_path: Path) -> None:
    tokenizer = load(save_folder("llama-2", tmp_path))
    lines = [("The fox", " jumps"), ("The f", "ox 你"), ("12", "34")]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in lines))
    prompts, _ = read_prompts(data, tokenizer, 64)
    for read, (prompt, answer) in zip(prompts, lines, strict=True):
        assert read.answer is not None
        assert tokenizer.decode([*read.token_ids, *read.answer]) == prompt + answer
