"""GGUF files of every architecture that is read, written as llama.cpp's converter lays them out.

The reference library reads each file too, where it knows the architecture, so that the writing here is checked.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model import load
from pilotfish_engine.model.gguf_checkpoint import GgufCheckpoint
from tests.engine.model.paging import Paged, Piece
from tests.engine.model.tiny import LLAMA3, MODELS, SMALL, gemma3, randomised

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-4}
TOKENS = torch.randint(0, SMALL["vocab_size"], (70,), generator=torch.Generator().manual_seed(2)).tolist()
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
QUANTISED = gguf.GGMLQuantizationType.Q8_0


def metadata(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    rope = config.rope_parameters
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 16,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    if "full_attention" in rope:
        values["attention.sliding_window"] = config.sliding_window
        values["attention.sliding_window_pattern"] = config.layer_types.index("full_attention") + 1
        values["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return values


def stored(architecture: str, name: str, weight: np.ndarray, heads: dict[str, int]) -> tuple[str, np.ndarray]:
    stem, end = name.rsplit(".", 1)
    block, _, part = stem.removeprefix("model.layers.").partition(".")
    names = NAMES | (OF_GEMMA if architecture == "gemma3" else {})
    where = f"blk.{block}.{names[part]}" if name.startswith("model.layers.") else names[stem]
    if architecture == "llama" and part in heads:
        halves = weight.reshape(heads[part], 2, -1, weight.shape[1])
        weight = halves.swapaxes(1, 2).reshape(weight.shape)
    if architecture == "gemma3" and "norm" in part + stem:
        weight = weight + 1
    return f"{where}.{end}", np.ascontiguousarray(weight)


def write(model: PreTrainedModel, architecture: str, file: Path, quantised: bool = False, **extra: np.ndarray) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in metadata(model).items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    for kind, number in (("bos", 1), ("eos", 2), ("eot", 5)):
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", number)
    heads = {
        "self_attn.q_proj": model.config.num_attention_heads,
        "self_attn.k_proj": model.config.num_key_value_heads,
    }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        own, weight = stored(architecture, name, tensor.numpy(), heads)
        if quantised and weight.ndim == 2 and weight.shape[1] % 32 == 0:
            writer.add_tensor(own, gguf.quants.quantize(weight, QUANTISED), raw_dtype=QUANTISED)
        else:
            writer.add_tensor(own, weight)
    for name, tensor in extra.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(file: Path) -> torch.Tensor:
    return Paged(load(file, torch.float32), 1, max_len=80).run([Piece(TOKENS)])[0]


def expected(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


torch.manual_seed(1)
# llama.cpp scales Gemma's scores by the head's size
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 3}
CASES: dict[str, tuple[str, PreTrainedModel]] = {
    "llama": ("llama", MODELS["untied"]),
    "tied llama": ("llama", MODELS["tied"]),
    "linear rope": ("llama", MODELS["linear rope"]),
    "yarn rope": ("llama", MODELS["yarn rope"]),
    "qwen2": ("qwen2", MODELS["qwen2"]),
    "qwen3": ("qwen3", MODELS["qwen3"]),
    "gemma3": ("gemma3", randomised(gemma3(**GEMMA))),
    "gemma3, scaled": (
        "gemma3",
        randomised(
            gemma3(
                **GEMMA,
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
            )
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_model_that_it_was_written_from(name: str, tmp_path: Path) -> None:
    architecture, model = CASES[name]
    file = tmp_path / "model.gguf"
    write(model, architecture, file)
    shape = load(file, torch.float32).shape
    assert (shape.bos_token_id, shape.eos_token_ids) == (1, (2, 5))
    assert shape.tie_word_embeddings == model.config.tie_word_embeddings
    torch.testing.assert_close(logits(file), expected(model), **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_quantised_as_the_reference_library_reads_it(name: str, tmp_path: Path) -> None:
    architecture, model = CASES[name]
    file = tmp_path / "model.gguf"
    write(model, architecture, file, quantised=True)
    read = type(model)(model.config).eval()
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=read)["tensors"]
    missing, unexpected = read.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    read.tie_weights()
    torch.testing.assert_close(logits(file), expected(read), **TOLERANCE)
    assert not torch.allclose(logits(file), expected(model), **TOLERANCE)


def test_what_is_stored_is_what_is_read_before_it_is_dequantised(tmp_path: Path) -> None:
    """The rows of llama's Q and K in halves too."""
    write(MODELS["untied"], "llama", tmp_path / "m.gguf", quantised=True)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        assert checkpoint.stored_type(name) == QUANTISED.name
        rows = checkpoint.read_stored(name)["weight"]
        assert np.array_equal(gguf.quants.dequantize(rows.numpy(), QUANTISED), checkpoint.read(name).numpy())


def test_llama3_rope_is_spelled_out_in_a_tensor(tmp_path: Path) -> None:
    model = MODELS["llama3 rope"]
    short, long = (
        LLAMA3["original_max_position_embeddings"] / LLAMA3[f"{name}_freq_factor"] for name in ("high", "low")
    )
    factors = []
    for i in range(0, 16, 2):
        wave = 2 * math.pi * LLAMA3["rope_theta"] ** (i / 16)
        smooth = (LLAMA3["original_max_position_embeddings"] / wave - 1) / 3
        between = 1 / ((1 - smooth) / LLAMA3["factor"] + smooth)
        factors.append(1 if wave < short else LLAMA3["factor"] if wave > long else between)
    write(model, "llama", tmp_path / "model.gguf", rope_freqs=np.array(factors, dtype=np.float32))
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), expected(model), **TOLERANCE)
    write(model, "llama", tmp_path / "short.gguf", rope_freqs=np.array(factors[1:], dtype=np.float32))
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight has 7 numbers, and a head of 16 .* turns by 8"):
        load(tmp_path / "short.gguf", torch.float32)
