"""Tiny random checkpoints, made by the reference library's own classes, against its logits in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pilotfish_engine.model import load, read_shape
from tests.engine.model.paging import Paged, Piece

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, PreTrainedModel] = {
    "untied": LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "tied": LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "one kv head": LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 1, "head_dim": 24})),
    "linear rope": LlamaForCausalLM(
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0})
    ),
    "llama3 rope": LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
    "mistral": MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)),
    "biased llama": LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True)),
    "yarn rope": LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=YARN)),
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=32)),
    "biased qwen3": Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, attention_bias=True)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_equals_the_reference(name: str, shard_size: str, tmp_path: Path) -> None:
    model = MODELS[name]
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases, which start as ones and zeros
            torch.nn.init.normal_(parameter, mean=0.5)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "40KB")
    prompt = torch.randint(0, SMALL["vocab_size"], (70,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    paged = Paged(load(tmp_path, torch.float32), 1, max_len=80)
    logits = [paged.run([Piece(prompt[start:end])])[0] for start, end in ((0, 40), (40, 69), (69, 70))]
    torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-4, atol=1e-4)


def test_the_shape_is_read_without_the_weights(tmp_path: Path) -> None:
    MODELS["tied"].config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"architectures": null', '"architectures": ["LlamaForCausalLM"]')
    )
    shape = read_shape(tmp_path)
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (64, 4, 2, 16)
    assert shape.eos_token_ids == (2, 7)
    assert shape.tie_word_embeddings
    assert shape.kv_elements_per_token == 2 * 3 * 2 * 16


def test_auxiliary_states_are_the_inputs_of_their_layers(tmp_path: Path) -> None:
    model = MODELS["untied"]
    model.save_pretrained(tmp_path)
    prompt = [5, 17, 80, 3]
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    paged = Paged(load(tmp_path, torch.float32), 1, max_len=16)
    hidden, taps = paged.decoder.forward(paged.inputs([Piece(prompt)]), paged.kv, aux_layers=(2, 0, 1, 3))
    for tap, layer in zip(taps[:3], (2, 0, 1), strict=True):
        torch.testing.assert_close(tap, states[layer][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, states[3][0], rtol=1e-4, atol=1e-4)
    normed = paged.decoder.norm(taps[3].contiguous())
    torch.testing.assert_close(normed, hidden)


def test_rotary_tables_reach_as_far_as_asked(tmp_path: Path) -> None:
    MODELS["untied"].save_pretrained(tmp_path)
    assert load(tmp_path, torch.float32).layers[0].attention.cos_sin.shape == (128, 16)
    assert load(tmp_path, torch.float32, max_positions=500).layers[0].attention.cos_sin.shape == (500, 16)
