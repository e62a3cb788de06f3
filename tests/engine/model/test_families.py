"""Tiny random checkpoints of every family against the reference library's logits, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from pilotfish_engine.model import Decoder, load, read_shape
from tests.engine.conformance.test_capturable import HOST_COPIES, Capturable, refuse
from tests.engine.model.paging import Paged, Piece, ancestors
from tests.engine.model.tiny import MODELS, SMALL, VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-4}


def prompt(length: int) -> list[int]:
    return torch.randint(0, SMALL["vocab_size"], (length,), generator=torch.Generator().manual_seed(2)).tolist()


def reference(name: str, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = MODELS[name](torch.tensor([tokens])).logits[0]
    return logits


def saved(name: str, folder: Path) -> Decoder:
    MODELS[name].save_pretrained(folder)
    return load(folder, torch.float32)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_equals_the_reference(name: str, shard_size: str, tmp_path: Path) -> None:
    MODELS[name].save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "40KB")
    tokens = prompt(70)
    expected = reference(name, tokens)
    decoder = load(tmp_path, torch.float32)
    (whole,) = Paged(decoder, 1, max_len=80).run([Piece(tokens)])
    torch.testing.assert_close(whole, expected, **TOLERANCE)
    paged = Paged(decoder, 1, max_len=80)
    logits = [paged.run([Piece(tokens[a:b])])[0] for a, b in ((0, 40), (40, 67), (67, 68), (68, 69), (69, 70))]
    torch.testing.assert_close(torch.cat(logits), expected, **TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tree_node_equals_its_own_line(name: str, tmp_path: Path) -> None:
    decoder = saved(name, tmp_path)
    paged = Paged(decoder, 2, max_len=64)
    prompts = [prompt(33), prompt(7)]
    paged.run([Piece(tokens) for tokens in prompts])
    trees = [Piece([5, 90, 71, 12, 8, 30, 44], [-1, 0, 0, 1, 2, 4, 5]), Piece([9, 17, 23], [-1, 0, 0])]
    for tree, tokens, logits in zip(trees, prompts, paged.run(trees, commit=False), strict=True):
        for node, found in enumerate(logits):
            line = tokens + [tree.tokens[other] for other in ancestors(tree.parents, node)]
            torch.testing.assert_close(found, reference(name, line)[-1], **TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_pass_is_capturable(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged(saved(name, tmp_path), 2, max_len=64)
    inputs = paged.inputs([Piece([5, 90, 71], [-1, 0, 0]), Piece([9, 17], [-1, 0])])
    for copy in HOST_COPIES:
        monkeypatch.setattr(torch.Tensor, copy, refuse)
    with torch.inference_mode(), Capturable():
        hidden, _ = paged.decoder.forward(inputs, paged.kv)
    monkeypatch.undo()
    assert hidden.isfinite().all()


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_is_near_the_reference(name: str, tmp_path: Path) -> None:
    """Most tokens: a router's choice between two experts may turn on a rounding."""
    MODELS[name].save_pretrained(tmp_path)
    (logits,) = Paged(load(tmp_path, torch.bfloat16), 1, max_len=80).run([Piece(prompt(70))])
    expected = reference(name, prompt(70))
    near = torch.nn.functional.cosine_similarity(logits, expected) > 0.98
    assert near.float().mean() > 0.7


def test_the_shape_is_read_without_the_weights(tmp_path: Path) -> None:
    MODELS["tied"].config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    shape = read_shape(tmp_path)
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (64, 4, 2, 16)
    assert shape.eos_token_ids == (2, 7)
    assert shape.tie_word_embeddings
    assert shape.kv_elements_per_token == 2 * 3 * 2 * 16


@pytest.mark.parametrize("name", VARIANTS)
def test_auxiliary_states_are_the_inputs_of_their_layers(name: str, tmp_path: Path) -> None:
    tokens = [5, 17, 80, 3]
    with torch.inference_mode():
        states = MODELS[name].model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    paged = Paged(saved(name, tmp_path), 1, max_len=16)
    hidden, taps = paged.decoder.forward(paged.inputs([Piece(tokens)]), paged.kv, aux_layers=(2, 0, 1, 3))
    for tap, layer in zip(taps[:3], (2, 0, 1), strict=True):
        torch.testing.assert_close(tap, states[layer][0], **TOLERANCE)
    torch.testing.assert_close(hidden, states[3][0], **TOLERANCE)
    normed = paged.decoder.norm(taps[3].contiguous())
    torch.testing.assert_close(normed, hidden)


def test_rotary_tables_reach_as_far_as_asked(tmp_path: Path) -> None:
    MODELS["untied"].save_pretrained(tmp_path)
    assert load(tmp_path, torch.float32).layers[0].attention.cos_sin.shape == (128, 16)
    assert load(tmp_path, torch.float32, max_positions=500).layers[0].attention.cos_sin.shape == (500, 16)


def test_a_latent_is_kept_once(tmp_path: Path) -> None:
    decoder = saved("deepseek v3", tmp_path)
    kv = decoder.new_kv_cache(num_pages=3, page_size=16)
    assert kv.k.shape == (3, 4 * 16, 1, 32 + 16)
    assert kv.v.numel() == 0
    kv.v[:, torch.tensor([3])] = kv.v[:, torch.tensor([7])]  # as a step moves accepted rows
    assert decoder.shape.kv_elements_per_token == 3 * (32 + 16)


@pytest.mark.parametrize("spelling", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_model_with_images(spelling: str, tmp_path: Path) -> None:
    text = {**SMALL, "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 9, "sliding_window_pattern": 2}
    sight = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = Gemma3Config(text_config=text, vision_config={**sight, "image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    file, old = tmp_path / "model.safetensors", "language_model.model."
    save_file({name.replace(old, spelling): tensor for name, tensor in load_file(file).items()}, file)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt(40)])).logits[0]
    (logits,) = Paged(load(tmp_path, torch.float32), 1, max_len=48).run([Piece(prompt(40))])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers wrote it before version 5."""
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config.pop("layer_types")
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope["type"] = rope.pop("rope_type")
    return {**config, "rope_theta": rope.pop("rope_theta"), "rope_scaling": None if rope["type"] == "default" else rope}


@pytest.mark.parametrize("name", ["tied", "linear rope", "llama3 rope", "yarn rope, by weights", "gemma3"])
def test_an_older_config_says_the_same(name: str, tmp_path: Path) -> None:
    MODELS[name].save_pretrained(tmp_path)
    newer, file = read_shape(tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(old_spelling(json.loads(file.read_text()))))
    assert read_shape(tmp_path) == newer


def test_yarn_reaches_what_it_stretches_to(tmp_path: Path) -> None:
    MODELS["yarn rope, beyond"].save_pretrained(tmp_path)
    assert read_shape(tmp_path).max_position_embeddings == 128


def test_dynamic_rope_reaches_as_far_as_the_model_was_trained(tmp_path: Path) -> None:
    """Where it turns as plain rope does. Past that every token turns all keys anew."""
    model, longest = MODELS["dynamic rope"], SMALL["max_position_embeddings"]
    model.save_pretrained(tmp_path)
    tokens = prompt(longest)
    paged = Paged(load(tmp_path, torch.float32), 1, max_len=longest)
    logits = torch.cat([paged.run([Piece(tokens[a:b])])[0] for a, b in ((0, 100), (100, longest))])
    torch.testing.assert_close(logits, reference("dynamic rope", tokens), **TOLERANCE)
    longer = reference("dynamic rope", [*tokens, *prompt(40)])[:longest]
    assert not torch.allclose(longer, logits, **TOLERANCE)


def rewrite(folder: Path, extra: dict[str, Tensor], **changes: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    file = folder / "model.safetensors"
    save_file({**load_file(file), **extra}, file)


def test_mimo_is_qwen2_under_another_name(tmp_path: Path) -> None:
    MODELS["qwen2"].save_pretrained(tmp_path)
    rewrite(tmp_path, {"model.mtp_layers.0.final_layernorm.weight": torch.ones(64)}, architectures=["MiMoForCausalLM"])
    (logits,) = Paged(load(tmp_path, torch.float32), 1, max_len=80).run([Piece(prompt(70))])
    torch.testing.assert_close(logits, reference("qwen2", prompt(70)), **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deepseek v3", "model.layers.3.eh_proj.weight"),
        ("glm4 moe", "model.layers.3.shared_head.norm.weight"),
        ("qwen3 next", "mtp.fc.weight"),
    ],
)
def test_a_draft_inside_the_checkpoint_is_left_to_others(name: str, tensor: str, tmp_path: Path) -> None:
    MODELS[name].save_pretrained(tmp_path)
    rewrite(tmp_path, {tensor: torch.ones(64)})
    (logits,) = Paged(load(tmp_path, torch.float32), 1, max_len=80).run([Piece(prompt(9))])
    torch.testing.assert_close(logits, reference(name, prompt(9)), **TOLERANCE)
