"""The KV cache is what memory leaves, and what cannot fit is refused with the sum and with what fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish_engine import reservation
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.errors import UsageError
from pilotfish_engine.reservation import SLACK
from pilotfish_engine.worker.machine_memory import DeviceMemory

MIB = 1 << 20
LENGTH = 4096
KV_TOKEN = 2 * 2 * 64 * 4  # keys and values of two layers of one head, float32
WEIGHTS = 64  # MB, about


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=LENGTH,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def build(model: Path, monkeypatch: pytest.MonkeyPatch, total: int, used: int = 0, **capacity: object) -> Parts:
    """On a device of so many MiB."""
    memory = DeviceMemory("a small device", total * MIB, used * MIB)
    monkeypatch.setattr(reservation, "memory_of", lambda device: memory)
    monkeypatch.setattr(reservation, "own_bytes", lambda device: 0)
    length = capacity.pop("max_model_len", None)
    return assemble(
        EngineConfig(
            model=ModelConfig(source=str(model), dtype="float32", max_model_len=length),  # type: ignore[arg-type]
            speculation=SpeculationConfig(method="None"),
            capacity=CapacityConfig(**({"max_running_requests": 64} | capacity)),  # type: ignore[arg-type]
        )
    )


def pool_bytes(parts: Parts) -> int:
    kv = parts.step.kv
    return sum(x.numel() * x.element_size() for x in (kv.k, kv.v))


@pytest.mark.parametrize("total", [32, 48])
@pytest.mark.parametrize("fraction", [0.5, 0.9])
@pytest.mark.parametrize("used", [0, 2])
def test_the_pool_is_what_the_fraction_leaves(model, monkeypatch, total, fraction, used):
    parts = build(model, monkeypatch, total, used, memory_fraction=fraction)
    found = parts.worker.speculation_report().device.memory_bytes
    usable = fraction * total * MIB
    assert found.get("others", 0) == used * MIB
    assert sum(found.values()) <= usable
    assert usable - sum(found.values()) < 2 * 16 * KV_TOKEN + 2, "to the last page, and the scratch page"
    assert pool_bytes(parts) == found["kv"] + 16 * KV_TOKEN
    sentence = parts.worker.limits.memory_sum
    assert f"{parts.worker.limits.num_pages * 16:,} tokens" in sentence
    assert "a small device" in sentence


def test_a_pool_is_no_larger_than_its_use(model, monkeypatch):
    parts = build(model, monkeypatch, 64_000, max_running_requests=4)
    assert parts.worker.limits.num_pages == -(-(LENGTH + SLACK) // 16), "on a CPU a quarter of the rows"


def test_no_room_for_one_request_is_said_before_weights_are_read(model, monkeypatch):
    monkeypatch.setattr("pilotfish_engine.engine.load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(UsageError) as caught:
        build(model, monkeypatch, 5)
    sentence = str(caught.value)
    assert "of 5.24 MB of a small device 4.72 MB may be used (--memory-fraction 0.9)" in sentence
    assert "one request of --max-model-len 4096 needs KV of" in sentence
    assert sentence.endswith("would work")


def test_what_would_fit_fits(model, monkeypatch):
    with pytest.raises(UsageError) as caught:
        build(model, monkeypatch, 8)
    (length,) = re.findall(r"--max-model-len (\d+)(?: or .*)? would work", str(caught.value))
    parts = build(model, monkeypatch, 8, max_model_len=int(length))
    assert parts.worker.limits.max_model_len == int(length)
    with pytest.raises(UsageError):
        build(model, monkeypatch, 8, max_model_len=2 * int(length))


def test_fewer_rows_are_offered_where_their_state_is_what_is_too_large(model, monkeypatch):
    with pytest.raises(UsageError, match="--max-running-requests") as caught:
        build(model, monkeypatch, 40, max_running_requests=2048)
    (rows,) = re.findall(r"--max-running-requests (\d+)", str(caught.value))
    assert build(model, monkeypatch, 40, max_running_requests=int(rows)).worker.limits.num_pages > 0


def test_a_pool_that_was_asked_for_and_does_not_fit(model, monkeypatch):
    with pytest.raises(UsageError, match=r"--kv-tokens 100000 needs KV of .* --kv-tokens \d+ would work") as caught:
        build(model, monkeypatch, 32, kv_tokens=100_000)
    (tokens,) = re.findall(r"or use|--kv-tokens (\d+) would work", str(caught.value))
    parts = build(model, monkeypatch, 32, kv_tokens=int(tokens) // 16 * 16 - 16)
    assert parts.worker.limits.num_pages * 16 == int(tokens) // 16 * 16 - 16


def test_a_device_that_holds_nothing_says_what_it_lacks(model, monkeypatch):
    with pytest.raises(UsageError, match="a device with more memory would work"):
        build(model, monkeypatch, 1, max_running_requests=1, max_model_len=16, page_size=256)


def test_the_sentence_adds_up():
    from pilotfish_engine.worker.memory_sum import MemorySum

    found = MemorySum("H", 80 * 10**9, 0.9, 10**9, 16 * 10**9, 10**9, 10**8, 3 * 10**9, 10**9, 131072)
    full = replace(found, kv_tokens=found.left // found.kv_token)
    assert full.usable - sum(full.parts().values()) < full.kv_token
    begin = "of 80 GB of H 72 GB may be used (--memory-fraction 0.9): 16 GB weights, 1 GB draft,"
    assert full.sentence().startswith(begin)


def test_fewer_rows_are_offered_where_the_pass_over_all_is_what_is_too_large(model, monkeypatch):
    with pytest.raises(UsageError, match=r"largest pass.*--max-running-requests") as caught:
        build(model, monkeypatch, 16, max_running_requests=4096, max_model_len=64)
    (rows,) = re.findall(r"--max-running-requests (\d+)", str(caught.value))
    parts = build(model, monkeypatch, 16, max_running_requests=int(rows), max_model_len=64)
    assert parts.worker.limits.num_pages > 0
