"""What is no model, or not the one that it claims to be, is refused in one sentence that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model import load
from tests.engine.model.tiny import MODELS, SMALL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)).save_pretrained(tmp_path)
    return tmp_path


def config_edit(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def tensor_edit(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return edit


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NORM = "model.layers.1.input_layernorm.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (tensor_edit(lambda t: t.pop(NORM)), rf"tensor {NORM} is missing; .* \[64\]"),
    "extra": (tensor_edit(lambda t: t.update(odd=torch.zeros(3))), r"tensor odd of shape \[3\] is none that"),
    "misshaped": (tensor_edit(lambda t: t.update({NORM: torch.zeros(5)})), rf"{NORM} has shape \[5\], .* \[64\]"),
    "integers": (tensor_edit(lambda t: t.update({NORM: torch.zeros(64).int()})), rf"{NORM} is int32; float32"),
    "truncated": (truncate, r"model.safetensors: not a whole safetensors file"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "lost shard": (lose_a_shard, "model-00002-of-00002.safetensors: no such file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "not readable as JSON"),
    "foreign": (config_edit(architectures=["MambaForCausalLM"]), "MambaForCausalLM is not supported; supported are"),
    "biased": (config_edit(mlp_bias=True), "mlp_bias True is not supported; False would work"),
    "no layers": (config_edit(num_hidden_layers=0), "num_hidden_layers is 0; a positive integer"),
    "odd groups": (config_edit(num_key_value_heads=3), "4 attention heads do not divide among 3 KV heads"),
    "long": (config_edit(rope_parameters={"rope_type": "longrope", "factor": 2.0}), "rope type 'longrope' is not"),
    "part of a head": (config_edit(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
    "quantised": (config_edit(quantization_config={"quant_method": "awq"}), "quantization_config .*awq.* would work"),
    "other size": (config_edit(vocab_size=97), r"embed_tokens.weight has shape \[96, 64\], .* \[97, 64\]"),
    "short of layers": (config_edit(num_hidden_layers=2), r"model.layers.2\S+ of shape .* is none that"),
}


def assert_refused(folder: Path, breaks: Callable[[Path], Any], message: str) -> None:
    load(folder, torch.float32)
    breaks(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder, torch.float32)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused(name: str, folder: Path) -> None:
    breaks, message = BROKEN[name]
    assert_refused(folder, breaks, message)


OTHER_FAMILIES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "linear attention": (
        "qwen3 next",
        config_edit(layer_types=["full_attention", "linear_attention", "full_attention"]),
        "layer 1 of Qwen3NextForCausalLM is of type 'linear_attention', which is not supported; .* would work",
    ),
    "linear attention by interval": (
        "qwen3 next",
        config_edit(layer_types=None, full_attention_interval=4),
        "layer 0 of Qwen3NextForCausalLM is of type 'linear_attention'",
    ),
    "window of another family": (
        "untied",
        config_edit(use_sliding_window=True, sliding_window=5),
        "sliding_window 5 in LlamaForCausalLM is not supported; use_sliding_window false would work",
    ),
    "window that is not used": (
        "qwen3, windows",
        config_edit(use_sliding_window=False),
        "layer 1 of Qwen3ForCausalLM is of type 'sliding_attention', which is not supported",
    ),
    "capped logits": ("gemma3", config_edit(final_logit_softcapping=30.0), "final_logit_softcapping 30.0 is not supp"),
    "looks ahead": ("gemma3", config_edit(use_bidirectional_attention=True), "use_bidirectional_attention True is not"),
    "norms of a layer": (
        "gemma3",
        tensor_edit(lambda t: t.pop("model.layers.1.pre_feedforward_layernorm.weight")),
        r"model.layers.1.pre_feedforward_layernorm.weight is missing; .* \[64\]",
    ),
    "rope by layer": (
        "untied",
        config_edit(rope_parameters={"full_attention": {"rope_theta": 5.0}}),
        "rope for full_attention alone is not supported",
    ),
    "odd rotation": (
        "glm4 moe",
        config_edit(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.2}),
        "the rotated part of a head is 3; rotary embeddings need an even number",
    ),
    "no expert": (
        "deepseek v3",
        tensor_edit(lambda t: t.pop("model.layers.2.mlp.experts.7.up_proj.weight")),
        r"model.layers.2.mlp.experts.7.up_proj.weight is missing; .* \[40, 64\]",
    ),
    "more experts": ("qwen3 moe", config_edit(num_experts=7), r"gate.weight has shape \[8, 64\], .* \[7, 64\]"),
    "no correction": (
        "glm4 moe",
        tensor_edit(lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias")),
        r"e_score_correction_bias is missing; .* \[8\]",
    ),
    "other latent": (
        "deepseek v3",
        config_edit(kv_lora_rank=48),
        r"kv_a_proj_with_mqa\S+ has shape \[48, 64\], .* \[64",
    ),
    "uneven groups": ("deepseek v3", config_edit(n_group=3), "8 experts do not form 3 groups; .* divides"),
    "small groups": ("deepseek v3", config_edit(n_group=8), "8 experts do not form 8 groups; .* two or more in each"),
    "more groups": ("deepseek v3", config_edit(topk_group=5), "topk_group 5 of 4 groups; at most 4 would work"),
    "closed experts": ("deepseek v3", config_edit(topk_group=1), "num_experts_per_tok is 3 and 2 experts are open"),
    "other choice": (
        "deepseek v2",
        config_edit(topk_method="noaux_tc"),
        "topk_method 'noaux_tc' is not supported; 'gre",
    ),
    "other scores": ("glm4 moe", config_edit(scoring_func="softmax"), "scoring_func 'softmax' is not supported; 'sigm"),
    "normed choice": ("deepseek v2", config_edit(norm_topk_prob=True), "norm_topk_prob True is not supported; False"),
    "some plain layers": ("deepseek v3", config_edit(moe_layer_freq=2), "moe_layer_freq 2 is not supported; 1 would"),
}


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_a_broken_folder_of_another_family_is_refused(name: str, tmp_path: Path) -> None:
    model, breaks, message = OTHER_FAMILIES[name]
    MODELS[model].save_pretrained(tmp_path)
    assert_refused(tmp_path, breaks, message)


def write_gguf(
    file: Path,
    architecture: str = "llama",
    skip: str = "",
    also: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **numbers: Any,
) -> None:
    """A random model of one layer. also: writes more keys."""
    fields = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 64, "context_length": 64}
    fields |= {"attention.head_count": 2, "attention.head_count_kv": 1, "vocab_size": 40} | numbers
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in fields.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    also(writer)
    shapes = {"token_embd": (40, 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32)}
    shapes |= {"blk.0.ffn_down": (32, 64)}
    for name, shape in shapes.items():
        if name != skip:
            writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def cut(file: Path, size: int) -> None:
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:size])


ROTATES_HALF: dict[str, Any] = {"rope.dimension_count": 8}
BROKEN_GGUF: dict[str, tuple[Callable[[Path], Any], str]] = {
    "absent": (lambda file: None, r"no such model; a \.gguf file, or a folder"),
    "truncated data": (lambda file: cut(file, -1000), "not a whole GGUF file of"),
    "truncated header": (lambda file: cut(file, 200), "not a whole GGUF file of 200 bytes"),
    "empty": (lambda file: file.touch(), "not a whole GGUF file of 0 bytes"),
    "text": (lambda file: file.write_text("hello" * 100), "not a whole GGUF file"),
    "foreign": (lambda file: write_gguf(file, "mamba"), "architecture 'mamba' is not supported; one of gemma3, llama"),
    "missing": (
        lambda file: write_gguf(file, skip="blk.0.attn_v"),
        r"self_attn.v_proj.weight is missing; .*\[16, 32\]",
    ),
    "misshaped": (
        lambda file: write_gguf(file, feed_forward_length=48),
        r"mlp.gate_proj.weight has shape \[64, 32\], .* \[48, 32\]",
    ),
    "no window": (
        lambda file: write_gguf(file, "gemma3"),
        "gemma3.attention.sliding_window is None; a positive integer",
    ),
    "no biases": (lambda file: write_gguf(file, "qwen2"), r"self_attn.q_proj.bias is missing; .*\[32\]"),
    "partial rotation": (lambda file: write_gguf(file, **ROTATES_HALF), "rotates 8 of 16 dimensions"),
}


@pytest.mark.parametrize("name", BROKEN_GGUF)
def test_a_broken_gguf_is_refused(name: str, tmp_path: Path) -> None:
    breaks, message = BROKEN_GGUF[name]
    file = tmp_path / "model.gguf"
    breaks(file)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(file, torch.float32)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_whole_small_gguf_loads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    assert load(tmp_path / "model.gguf", torch.bfloat16).shape.vocab_size == 40


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match=r"not a model; a \.gguf file, or a folder"):
        load(tmp_path / "model.bin", torch.float32)
