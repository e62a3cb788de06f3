"""What `inspect` says of checkpoints of every kind, beside the reference library, the loaded model and the methods."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish_engine.cli import main
from pilotfish_engine.config import resolve
from pilotfish_engine.contract.methods import Method
from pilotfish_engine.errors import CheckpointError, UsageError
from pilotfish_engine.inspection import Description, describe, text_of
from pilotfish_engine.model import load
from pilotfish_engine.model.eagle import load_head
from pilotfish_engine.speculation import registry
from tests.engine.model.test_gguf import write
from tests.engine.model.tiny import MODELS, SMALL, VARIANTS
from tests.engine.speculation import block_drafts
from tests.engine.speculation.eagle_formats import FORMATS
from tests.engine.speculation.eagle_heads import SIZES, target_model
from tests.engine.speculation.mtp_checkpoints import KINDS, NUM_LAYERS, Reference


def inspect(source: Path | str, target: Path | str | None = None, **flags: str) -> Description:
    return describe(resolve({"model": str(source), **flags}, {}), None if target is None else str(target))


@pytest.fixture(scope="module")
def eagle_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    target_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    config = LlamaConfig(**SIZES | {"hidden_size": 48, "num_hidden_layers": 3})
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_is_what_it_was_made_as_and_takes_what_the_engine_allocates(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    model.save_pretrained(tmp_path)
    found = inspect(tmp_path, max_model_len="100", max_running_requests="3")
    config = model.config
    assert found.family == type(model).__name__
    assert (found.sizes.layers, found.sizes.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (found.sizes.vocab_size, found.sizes.context) == (config.vocab_size, config.max_position_embeddings)
    tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}  # tied ones once
    assert found.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert (found.beside, dict(found.stored.dtypes)) == (0, {"F32": found.parameters})
    assert found.stored.bytes == (tmp_path / "model.safetensors").stat().st_size
    cache = load(tmp_path, torch.float32).new_kv_cache(num_pages=4, page_size=8)
    pools = {tensor.data_ptr(): tensor for tensor in (cache.k, cache.v)}.values()
    slots = cache.k.shape[1]
    memory = found.memory["float32"]
    assert memory.kv_token * slots == sum(tensor.numel() * tensor.itemsize for tensor in pools)
    assert memory.weights == found.parameters * 4 == 2 * found.memory["bfloat16"].weights
    assert (memory.kv_context, memory.kv) == (memory.kv_token * 128, memory.kv_token * 100 * 3)
    assert found.is_model
    assert found.draft_of == ("STANDALONE",)
    assert found.offers is not None
    assert found.offers.alone == ("NGRAM",)
    assert "is an MTP head's" in found.offers.refused["MTP"]
    assert found.offers.with_draft == tuple(method.name for method in registry.methods() if method.needs_draft)


@pytest.mark.parametrize("name", FORMATS)
def test_an_eagle_head_in_any_format(name: str, tmp_path: Path, eagle_target: Path, other_target: Path) -> None:
    head = FORMATS[name](target_model())
    head.write(tmp_path / "head")
    method = "EAGLE3" if name.startswith("EAGLE-3") else "EAGLE"
    found = inspect(tmp_path / "head")
    assert (found.is_model, found.draft_of, found.fit, found.offers) == (False, (method,), None, None)
    stored = load_file(tmp_path / "head/model.safetensors")
    assert found.parameters == sum(tensor.numel() for tensor in stored.values())
    assert found.sizes.layers == head.layers.num_hidden_layers
    loaded = load_head(tmp_path / "head", load(eagle_target, torch.float32), torch.float32, 64)
    cache = loaded.new_kv_cache(2, 4)
    elements = cache.k.numel() + cache.v.numel()
    assert found.sizes.kv_elements * cache.k.shape[1] == elements
    fit = inspect(tmp_path / "head", eagle_target).fit
    assert fit is not None
    assert (fit.fits, fit.method, fit.reason) == (True, method, None)
    fit = inspect(tmp_path / "head", other_target).fit
    assert fit is not None
    assert (fit.fits, fit.method) == (False, method)
    assert fit.reason is not None
    assert re.search(
        "hidden states of 32, and the target's have 48|do not ascend in a target of 3|outside of", fit.reason
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama"])  # a family without heads of its own
def test_heads_inside_a_model_and_alone(kind: str, tmp_path: Path, eagle_target: Path, other_target: Path) -> None:
    count = 1 if kind == "qwen" else 2
    reference = Reference(KINDS[kind], count, tmp_path / "model")
    heads = reference.save(tmp_path / "heads", reference.head_tensors())
    whole = inspect(tmp_path / "model")
    assert whole.offers is not None
    assert whole.offers.alone == ("MTP", "NGRAM")
    of_heads = sum(prod(tensor.shape) for tensor in reference.head_tensors().values())
    assert whole.beside == of_heads
    assert whole.sizes.layers == NUM_LAYERS
    alone = inspect(heads, tmp_path / "model")
    assert (alone.is_model, alone.draft_of, alone.parameters) == (False, ("MTP",), of_heads)
    assert alone.sizes.layers == count
    assert alone.sizes.kv_elements * NUM_LAYERS == whole.sizes.kv_elements * count
    assert alone.fit is not None
    assert alone.fit.fits
    if count == 2:
        assert alone.fit.limits is not None
        assert re.search("num_steps is 8, .* at most 2 would work", alone.fit.limits)
    for target in (eagle_target, other_target):  # the first has their vocabulary and hidden size, but other layers
        fit = inspect(heads, target).fit
        assert fit is not None
        assert (fit.fits, fit.method) == (False, "MTP")


def test_a_block_draft(tmp_path: Path, other_target: Path) -> None:
    block_drafts.tiny_target(64).save_pretrained(tmp_path / "target")
    draft = block_drafts.block_draft(64).save(tmp_path / "draft")
    found = inspect(draft, tmp_path / "target")
    assert (found.is_model, found.draft_of, found.sizes.layers) == (False, ("DFLASH",), 2)
    assert found.sizes.kv_elements == 2 * 2 * 2 * 16
    assert found.fit is not None
    assert found.fit.fits
    assert found.fit.limits is not None
    assert "blocks of 6 tokens" in found.fit.limits
    fit = inspect(draft, other_target).fit
    assert fit is not None
    assert fit.reason is not None
    assert f"the draft draft has hidden_size 32 and the target {other_target.name} 48;" in fit.reason


def test_a_small_model_beside_a_large_one(tmp_path: Path, eagle_target: Path, other_target: Path) -> None:
    fit = inspect(other_target, eagle_target).fit
    assert fit is not None
    assert (fit.fits, fit.method, fit.limits) == (True, "STANDALONE", None)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    fit = inspect(tmp_path, eagle_target).fit
    assert fit is not None
    assert fit.reason is not None
    assert "vocabulary of 96 tokens and the target" in fit.reason


def test_a_method_from_outside_is_asked_too(monkeypatch: pytest.MonkeyPatch, other_target: Path) -> None:
    for table in ("_METHODS", "_MODULES"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    registry.register(Method("TOY", "for a test", preference=9), "pilotfish_engine.speculation.ngram")
    offers = inspect(other_target).offers
    assert offers is not None
    assert offers.alone == ("TOY", "NGRAM")


def test_a_gguf_file(tmp_path: Path) -> None:
    model = MODELS["qwen2"]
    write(model, "qwen2", tmp_path / "m.gguf", quantised=True)
    found = inspect(tmp_path / "m.gguf", other := tmp_path / "m.gguf")
    assert found.parameters == sum(found.stored.dtypes.values()) == model.num_parameters()
    matrices = sum(tensor.numel() for tensor in model.parameters() if tensor.ndim == 2 and tensor.shape[1] % 32 == 0)
    assert found.stored.dtypes == {"Q8_0": matrices, "F32": found.parameters - matrices}
    assert found.stored.bytes == other.stat().st_size
    assert found.sizes.layers == 3
    assert found.fit is not None
    assert (found.fit.fits, found.fit.method) == (True, "STANDALONE")
    assert re.search(r"stored as +Q8_0 \d\d%, F32 \d\d?%", text_of(found))


def test_eight_billion_parameters_are_told_from_their_headers(tmp_path: Path) -> None:
    """The shards are holes behind their headers: reading them would take minutes, and more memory than there is."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {name: list(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    weight_map: dict[str, str] = {}
    for number in range(8):
        names, end, file = list(shapes)[number::8], 0, f"model-{number}.safetensors"
        header: dict[str, Any] = {}
        for name in names:
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + 2 * prod(shapes[name])]}
            end += 2 * prod(shapes[name])
        encoded = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as opened:
            opened.write(len(encoded).to_bytes(8, "little") + encoded)
            opened.truncate(8 + len(encoded) + end)
        weight_map |= dict.fromkeys(names, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    text = text_of(inspect(tmp_path, max_model_len="8192", max_running_requests="64"))
    assert "8.0 billion, 16.1 GB on disk" in text
    assert re.search("bfloat16 +16.1 GB weights, 131 kB KV a token, 17.2 GB a whole context, 68.7 GB 64 requests", text)
    assert re.search("stored as +BF16 100%", text)


def drop(file: Path, name: str) -> None:
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor is missing": (
        lambda f: drop(f / "model.safetensors", "model.norm.weight"),
        "model.norm.weight is missing",
    ),
    "cut off": (lambda f: cut(f / "model.safetensors"), "not a whole safetensors file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "not readable as JSON"),
    "unknown": (
        lambda f: (f / "config.json").write_text('{"architectures": ["Mamba2ForCausalLM"]}'),
        "architecture Mamba2ForCausalLM is not supported",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused(name: str, tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    damage, sentence = BROKEN[name]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        inspect(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_broken_head_is_refused_as_what_it_is(tmp_path: Path, eagle_target: Path) -> None:
    for name, part in {"EAGLE-3": "norm.weight", "EAGLE": "layers.0.mlp.up_proj.weight"}.items():
        folder = FORMATS[name](target_model()).write(tmp_path / name)
        drop(folder / "model.safetensors", part)
        for target in (None, eagle_target):
            with pytest.raises(CheckpointError, match=f"tensor {part} is missing"):
                inspect(folder, target)
    draft = block_drafts.block_draft(64).save(tmp_path / "draft")
    drop(draft / "model.safetensors", "norm.weight")
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing"):
        inspect(draft)


def test_more_context_than_there_is_is_refused(other_target: Path) -> None:
    with pytest.raises(UsageError, match=r"--max-model-len is 129, and .* reaches 128; at most 128 would work"):
        inspect(other_target, max_model_len="129")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command: its exit code, and what it wrote."""
    monkeypatch.setenv("PILOTFISH_MAX_MODEL_LEN", "x")  # of the server

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["inspect", *arguments])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def test_the_exit_code_says_whether_it_fits(run, tmp_path: Path, eagle_target: Path, other_target: Path) -> None:
    head = str(FORMATS["EAGLE-3"](target_model()).write(tmp_path / "head"))
    assert run(head)[0] == 0
    code, out, err = run(head, "--target", str(eagle_target), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["fit"]["method"] == "EAGLE3"
    code, out, err = run(head, "--target", str(other_target))
    assert (code, err) == (1, "")
    assert re.search("beside +.*: EAGLE3 does not fit\nbecause +the draft .* reads hidden states of 32", out)
    code, out, err = run(head, "--target", str(tmp_path / "nothing"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert run(head, "--max-model-len", "many")[0] == 2
