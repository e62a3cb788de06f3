"""Greedy answers of other families' targets under trees: accepted rows move in every kind of cache."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.engine.conformance import harness
from tests.engine.conformance.conftest import prompts
from tests.engine.conformance.harness import Harness, fixed
from tests.engine.model.tiny import MODELS

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own


@pytest.mark.parametrize("name", ["qwen3", "deepseek v3", "glm4 moe", "qwen3 moe", "qwen3 next"])
def test_trees_change_no_answer(name, tmp_path):
    model = MODELS[name]
    near = copy.deepcopy(model)
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in near.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    model.save_pretrained(tmp_path / "target")
    near.save_pretrained(tmp_path / "near")
    engine = Harness(harness.load(tmp_path / "target", "STANDALONE", tmp_path / "near", 16))
    engine.scheduler.set_envelope(fixed(4, 4))
    asked = prompts(3, seed=71)
    answers = engine.run(asked, max_tokens=20, ignore_eos=True)
    for prompt, answer in zip(asked, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(dim=1).tolist() == answer
    accepted = [length for _, result in engine.worker.steps for length in result.accept_lens.tolist()]
    assert max(accepted) > 2, "no path was long enough to be moved"
