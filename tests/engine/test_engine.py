"""What `assemble` refuses, each with one sentence that names the thing, the value and what would work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.engine import assemble, build
from pilotfish_engine.errors import MethodError, UsageError
from pilotfish_engine.messages import SamplingParams, Submit

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
}


def checkpoint(folder: Path, vocab_size: int, letters: str = "") -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    if letters:
        vocabulary = {letter: number for number, letter in enumerate(letters)}
        model = {"type": "BPE", "vocab": vocabulary, "merges": []}
        (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"model": model}))
    return folder


def run(target: Path, draft: Path | None = None, method: str = "Auto", **model: object) -> None:
    assemble(
        EngineConfig(
            model=ModelConfig(source=str(target), **model),  # type: ignore[arg-type]
            speculation=SpeculationConfig(method=method, draft=None if draft is None else str(draft)),
            capacity=CapacityConfig(max_running_requests=2),
        )
    )


def test_a_draft_of_another_size_of_vocabulary(tmp_path):
    target, draft = checkpoint(tmp_path / "target", 4), checkpoint(tmp_path / "draft", 5)
    with pytest.raises(MethodError, match=r"draft has a vocabulary of 5 tokens and the target target one of 4"):
        run(target, draft)


def test_a_draft_whose_tokens_have_other_numbers(tmp_path):
    target, draft = checkpoint(tmp_path / "target", 4, "abcd"), checkpoint(tmp_path / "draft", 4, "abdc")
    with pytest.raises(MethodError, match=r"token 2 is b'd' in the draft draft and b'c' in the .*2 tokens differ"):
        run(target, draft)


def test_a_draft_is_read_like_any_checkpoint(tmp_path):
    target = checkpoint(tmp_path / "target", 4)
    draft = shutil.copytree(target, tmp_path / "draft")
    (draft / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"draft"):
        run(target, draft)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "MAGIC"}, r"method 'MAGIC' is unknown; one of None, Auto, .* would work"),
        ({"method": "None", "draft": Path("x")}, r"method None takes no draft"),
        ({"dtype": "int3"}, r"--dtype is 'int3'; one of auto, float32, bfloat16 would work"),
        ({"max_model_len": 65}, r"--max-model-len is 65, and the checkpoint reaches 64; at most 64 would work"),
    ],
)
def test_settings_that_cannot_work(tmp_path, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        run(checkpoint(tmp_path / "target", 4), **options)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_small_cache_is_the_context_and_an_answer_that_fills_it_ends_for_length(tmp_path, overlap):
    """With every step reserving 64 rows."""
    scheduler = build(
        EngineConfig(
            model=ModelConfig(source=str(checkpoint(tmp_path / "target", 4)), dtype="float32"),
            speculation=SpeculationConfig(
                method="NGRAM", envelope=Envelope(num_steps=8, topk=8, num_draft_tokens=64, tuning="Fixed")
            ),
            capacity=CapacityConfig(max_running_requests=2, kv_tokens=40, overlap=overlap),
        )
    )
    assert scheduler.limits.max_model_len == 40
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    for name in "ab":
        scheduler.submit(Submit(request_id=name, prompt=[1, 2, 1, 2, 1], params=params))
    outputs = [output for _ in range(200) for output in scheduler.step()]
    for name in "ab":
        own = [output for output in outputs if output.request_id == name]
        assert own[-1].finish_reason == "length", own[-1].error
        assert sum(len(output.token_ids) for output in own) == 35
    scheduler.check()
