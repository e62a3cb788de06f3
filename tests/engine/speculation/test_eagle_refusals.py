"""A head that is not whole, cannot run or does not fit its target is refused from metadata, in one sentence with the
thing, both values and what would work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM

from pilotfish_engine.contract.methods import Limits
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.engine import check_vocabulary
from pilotfish_engine.errors import UsageError
from pilotfish_engine.model import read_shape
from pilotfish_engine.speculation import eagle, eagle3
from pilotfish_engine.speculation.proposer import Models
from tests.engine.speculation import eagle_heads as heads
from tests.engine.speculation.eagle_formats import FORMATS, of_speculators, plain
from tests.engine.speculation.eagle_heads import HIDDEN, LAYERS, VOCAB, as_speculators

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

Edit = Callable[[Path], None]
IDS = "eagle_aux_hidden_state_layer_ids"
MODULES = {"eagle": eagle, "eagle3": eagle3}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return heads.target_model()


@pytest.fixture(scope="module")
def folder(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    target.save_pretrained(path)
    write_tokenizer(path, [f"t{number}" for number in range(VOCAB)])
    return path


def write_tokenizer(path: Path, tokens: list[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


def check(folder: Path, draft: Path, kind: str) -> Limits:
    shape = read_shape(folder)
    return MODULES[kind].check(Models(folder, shape, draft, partial(check_vocabulary, folder, shape)))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    def edit(path: Path) -> None:
        found = load_file(path / "model.safetensors")
        change(found)
        save_file(found, path / "model.safetensors")

    return edit


def config(**changes: Any) -> Edit:
    """`a__b=value` sets b inside a."""

    def edit(path: Path) -> None:
        written = json.loads((path / "config.json").read_text())
        for key, value in changes.items():
            outer, _, inner = key.partition("__")
            if inner:
                written.setdefault(outer, {})[inner] = value
            else:
                written[outer] = value
        (path / "config.json").write_text(json.dumps(written))

    return edit


def both(first: Edit, second: Edit) -> Edit:
    def edit(path: Path) -> None:
        first(path)
        second(path)

    return edit


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def shifted(draft_id: int, by: int) -> Edit:
    def change(found: dict[str, torch.Tensor]) -> None:
        found["d2t"][draft_id] += by

    return tensors(change)


def doubled(found: dict[str, torch.Tensor]) -> None:
    found["d2t"][5] = found["d2t"][4] - 1


GATE, SPECULATED = "midlayer.mlp.gate_proj.weight", "EAGLE-3 of speculators"
EAGLE, EAGLE3 = "EAGLE", "EAGLE-3"

# case → (format, what is done to it, what the error says)
REFUSED: dict[str, tuple[str, Edit, str]] = {
    # tensors
    "missing": (EAGLE3, tensors(lambda t: t.pop(GATE)), rf"tensor {GATE} is missing; .* \[48, 32\]"),
    "missing norm": (EAGLE3, tensors(lambda t: t.pop("norm.weight")), r"norm.weight is missing; .* \[32\]"),
    "missing map": (EAGLE3, tensors(lambda t: t.pop("d2t")), r"tensor d2t is missing; .* \[24\]"),
    "missing head": (EAGLE3, tensors(lambda t: t.pop("lm_head.weight")), r"lm_head.weight is missing; .*\[24, 32\]"),
    "missing projection": (
        EAGLE,
        tensors(lambda t: t.pop("layers.0.mlp.up_proj.weight")),
        r"up_proj.weight is missing",
    ),
    "missing fc": (EAGLE3, tensors(lambda t: t.pop("fc.weight")), r"fc.weight is missing; .* \[32, 96\]"),
    "missing norm of the state": (
        EAGLE3,
        tensors(lambda t: t.pop("midlayer.hidden_norm.weight")),
        r"midlayer.hidden_norm.weight is missing; .* \[32\]",
    ),
    "no fc at all": (EAGLE, tensors(lambda t: t.pop("fc.weight")), "is of LlamaForCausalLM, not an EAGLE head"),
    "missing bias": (EAGLE, config(bias=True), r"fc.bias is missing; its config asks for shape \[32\]"),
    "missing norms of the states": (
        "EAGLE-3.1",
        tensors(lambda t: t.pop("model.fc_norm.3.weight")),
        r"fc_norm.3.weight is missing; .* \[32\]",
    ),
    "missing norm of all states": (EAGLE3, config(norm_before_fc=True), r"input_norm.weight is missing; .* \[96\]"),
    "extra": (EAGLE3, tensors(lambda t: t.update(odd=torch.zeros(3))), r"odd of shape \[3\] is none that an EAGLE-3"),
    "extra layer": (
        EAGLE3,
        tensors(lambda t: t.update({"additional_layers.0.hidden_norm.weight": torch.zeros(32)})),
        r"additional_layers.0.hidden_norm.weight of shape \[32\] is none that",
    ),
    "extra norm": (EAGLE, tensors(lambda t: t.update({"norm.weight": torch.ones(32)})), r"norm.weight .* is none that"),
    "the same twice": (
        SPECULATED,
        tensors(lambda t: t.update({"model.norm.weight": torch.ones(32)})),
        r"norm.weight and .*norm.weight are the same tensor; one of them",
    ),
    "misshaped": (
        EAGLE3,
        tensors(lambda t: t.update({GATE: torch.zeros(5)})),
        rf"{GATE} has shape \[5\], .* \[48, 32\]",
    ),
    "misshaped fc": (
        EAGLE,
        tensors(lambda t: t.update({"fc.weight": torch.zeros(32, 33)})),
        r"fc.weight has shape \[32, 33\], .* \[32, 64\]",
    ),
    "misshaped queries": (
        EAGLE3,
        tensors(lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.zeros(32, 32)})),
        r"q_proj.weight has shape \[32, 32\], .* \[32, 64\]",
    ),
    "pickled": (EAGLE3, pickled, "pytorch_model.bin is a pickle, which is never read; .* model.safetensors would work"),
    "quantised": (
        EAGLE3,
        config(quantization_config={"quant_method": "awq"}),
        r"quantization_config \{'quant_method': 'awq'\} is not supported",
    ),
    # vocabulary
    "head of another size": (
        EAGLE3,
        config(draft_vocab_size=20),
        r"lm_head.weight has shape \[24, 32\], but its config asks for \[20, 32\]",
    ),
    "map of another size": (
        EAGLE3,
        tensors(lambda t: t.update(d2t=torch.zeros(20, dtype=torch.int64))),
        r"d2t has shape \[20\], .* \[24\]",
    ),
    "draft vocabulary above the target's": (
        EAGLE3,
        config(draft_vocab_size=65),
        "draft_vocab_size is 65 and vocab_size 64; from 1 to 64 would work",
    ),
    "map above the vocabulary": (EAGLE3, shifted(23, 64), "d2t makes draft token 23 token .* of 64; a map into"),
    "map below zero": (EAGLE3, shifted(0, -64), "d2t makes draft token 0 token -.* of 64"),
    "map of two to one": (EAGLE3, tensors(doubled), "d2t makes draft tokens 4 and 5 both token .*; a different one"),
    "map of int32": (EAGLE3, tensors(lambda t: t.update(d2t=t["d2t"].int())), "d2t is int32; int64 would work"),
    "map of floats": (EAGLE3, tensors(lambda t: t.update(d2t=t["d2t"].float())), "d2t is float32; int64 would work"),
    "other vocabulary": (
        "EAGLE without embedding",
        config(vocab_size=60),
        "has a vocabulary of 60 tokens and the target .* one of 64",
    ),
    "other vocabulary than the embedding's": (EAGLE, config(vocab_size=60), r"shape \[64, 32\], .* \[60, 32\]"),
    "other tokens": (
        EAGLE3,
        lambda path: write_tokenizer(path, [f"t{n}" if n != 7 else "seven" for n in range(VOCAB)]),
        r"token 7 is b'seven' in the draft .* and b't7' in the target .* \(1 tokens differ\)",
    ),
    "truncated vocabulary": (
        "EAGLE of vLLM",
        config(truncated_vocab_size=32),
        "truncated_vocab_size is 32 and vocab_size 64; equal ones would work",
    ),
    # widths
    "other target width": (
        "EAGLE-3 of another width",
        both(config(target_hidden_size=40), tensors(lambda t: t.update({"fc.weight": torch.zeros(48, 120)}))),
        "reads hidden states of 40, and the target's have 32; a draft trained beside",
    ),
    "no embedding of its own": (
        "EAGLE-3 of another width",
        tensors(lambda t: t.pop("embed_tokens.weight")),
        "has no embed_tokens.weight, but hidden size 48 and not the target's 32",
    ),
    # layers that are read
    "too many for fc": (
        EAGLE3,
        config(**{IDS: [2, 3, 4, 5]}),
        rf"{IDS} \[2, 3, 4, 5\] are 4, but .*\[32, 96\] reads 3",
    ),
    "too few for fc": (EAGLE3, config(**{IDS: [2, 3]}), rf"{IDS} \[2, 3\] are 2, but fc.weight .* reads 3 of 32"),
    "other count": (
        EAGLE3,
        config(**{IDS: [2, 3, 4], "num_aux_hidden_states": 5}),
        r"are 3, but num_aux\S+ is 5; equal",
    ),
    "count without ids": (EAGLE3, config(num_aux_hidden_states=5), f"num_aux_hidden_states is 5, and no {IDS} says"),
    "unordered": (EAGLE3, config(**{IDS: [2, 5, 4]}), rf"{IDS} \[2, 5, 4\], which do not ascend in a target of 8"),
    "repeated": (EAGLE3, config(eagle_config={IDS: [2, 4, 4]}), r"\[2, 4, 4\], which do not ascend"),
    "behind the last": (
        EAGLE3,
        config(**{IDS: [2, 4, 9]}),
        r"\[2, 4, 9\], which reach outside of the target's 8 layers",
    ),
    "output behind the last": (
        EAGLE3,
        config(**{IDS: [1, 4, 8]}),
        r"\[1, 4, 8\] \(of outputs.*outside of the target's 8",
    ),
    "negative": (EAGLE3, config(**{IDS: [-6, -4, -2]}), r"\[-6, -4, -2\], which reach outside"),
    "no numbers": (EAGLE3, config(**{IDS: [2, "4", 5]}), r"is \[2, '4', 5\]; a list of layer numbers would work"),
    "two lists": (
        EAGLE3,
        config(**{IDS: [2, 4, 5], f"eagle_config__{IDS}": [2, 4, 6]}),
        r"\[2, 4, 5\], but \[2, 4, 6\]",
    ),
    # what cannot run
    "both kinds of norms": (
        "EAGLE-3.1",
        config(norm_before_fc=True),
        "norm_before_fc and fc_norm are both true; one of them would work",
    ),
    "norms of nothing": (
        "EAGLE-3 of the final state",
        config(norm_before_fc=True),
        "norm_before_fc is true, but use_aux_hidden_state is false",
    ),
    "latent attention": (EAGLE3, config(model_type="deepseek_v3"), "model_type 'deepseek_v3' are not .*llama, mistral"),
    "experts": (EAGLE3, config(model_type="qwen3_moe"), "layers of model_type 'qwen3_moe' are not supported in a head"),
    "sliding window": (
        EAGLE3,
        config(layer_types=["sliding_attention"]),
        "'sliding_attention', which is not supported",
    ),
    "other activation": (EAGLE, config(hidden_act="gelu"), "hidden_act 'gelu' is not supported; 'silu' would work"),
    "parallel drafting": (
        EAGLE3,
        config(parallel_drafting=True),
        "parallel_drafting True is not supported; False would",
    ),
    "norms of MTP": (
        EAGLE3,
        config(eagle_config={"use_mtp_layernorm": True}),
        "use_mtp_layernorm True is not supported",
    ),
    "norms of TTT": ("EAGLE of speculators", config(layernorms=True), "layernorms True is not supported; False would"),
    "silent residual": (
        SPECULATED,
        config(norm_before_residual=None),
        "no norm_before_residual, .*; true or false would",
    ),
    "no layers": (SPECULATED, config(transformer_layer_config=None), "transformer_layer_config is None; an object"),
    "other verifier": (
        SPECULATED,
        config(speculators_config={"verifier": {"architectures": ["Qwen3ForCausalLM"]}}),
        "is for Qwen3ForCausalLM, and the target is LlamaForCausalLM; a draft trained beside",
    ),
    # other methods
    "P-EAGLE": (SPECULATED, config(speculators_model_type="peagle"), "is of peagle, not an EAGLE-3 head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused(case: str, target: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    name, edit, message = REFUSED[case]
    head = FORMATS[name](target)
    head.write(tmp_path)
    check(folder, tmp_path, head.kind)
    edit(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        check(folder, tmp_path, head.kind)
    assert str(tmp_path.name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_method_is_named(target: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    one, three = heads.eagle(target).write(tmp_path / "1"), heads.eagle3(target).write(tmp_path / "3")
    with pytest.raises(UsageError, match="is an EAGLE head, not an EAGLE-3 head; --method EAGLE would work"):
        check(folder, one, "eagle3")
    with pytest.raises(UsageError, match="is an EAGLE-3 head, not an EAGLE head; --method EAGLE3 would work"):
        check(folder, three, "eagle")
    with pytest.raises(UsageError, match=r"is of LlamaForCausalLM, not an EAGLE head; .* --method STANDALONE would"):
        check(folder, folder, "eagle")
    with pytest.raises(UsageError, match=r"model.gguf: no such head; a folder"):
        check(folder, tmp_path / "model.gguf", "eagle3")


@pytest.mark.parametrize(("draft_vocab", "topk"), [(3, 4), (7, 8)])
def test_more_children_than_tokens(
    draft_vocab: int, topk: int, target: LlamaForCausalLM, folder: Path, tmp_path: Path
) -> None:
    heads.eagle3(target, draft_vocab=draft_vocab).write(tmp_path)
    limits = check(folder, tmp_path, "eagle3")
    assert limits.misfit(Envelope(topk=draft_vocab)) is None
    misfit = limits.misfit(Envelope(topk=topk))
    assert misfit
    assert misfit.field == "topk"
    assert re.search(f"topk is {topk}, but .* {draft_vocab} tokens; at most {draft_vocab} would", misfit.sentence)


@pytest.mark.parametrize("layers", [4, 6])
def test_the_usual_layers_of_a_shallow_target(
    layers: int, target: LlamaForCausalLM, folder: Path, tmp_path: Path
) -> None:
    """2, n/2 and n-3 need seven layers to be three."""
    heads.eagle3(target).write(tmp_path)
    shape = read_shape(folder)
    shallow = type(shape)(**{**vars(shape), "num_layers": layers})
    judged = Models(folder, shallow, tmp_path, lambda path, size: None)
    usual = rf"\[2, {layers // 2}, {layers - 3}\]"
    with pytest.raises(UsageError, match=f"no {IDS}, and the usual three would be {usual}, which do not ascend"):
        eagle3.check(judged)


def test_hidden_size(folder: Path, tmp_path: Path) -> None:
    sizes = heads.SIZES | {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    wide = LlamaForCausalLM(type(heads.target_model().config)(**sizes, num_hidden_layers=LAYERS))
    wide.save_pretrained(tmp_path / "target")
    heads.eagle(heads.target_model()).write(tmp_path / "1")
    heads.eagle3(heads.target_model()).write(tmp_path / "3")
    for kind in ("eagle", "eagle3"):
        with pytest.raises(UsageError, match="reads hidden states of 32, and the target's have 24; a draft trained"):
            check(tmp_path / "target", tmp_path / kind.removeprefix("eagle").rjust(1, "1"), kind)


def test_every_format_passes(target: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    for number, build in enumerate(FORMATS.values()):
        head = build(target)
        check(folder, head.write(tmp_path / str(number)), head.kind)


def test_what_training_left_behind_is_no_matter(target: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    head = as_speculators(heads.eagle3(target, spell=plain), "eagle3", draft_vocab_size=24, norm_before_residual=False)
    head.weights["verifier_norm.weight"] = torch.ones(HIDDEN)
    head.weights["verifier_lm_head.weight"] = torch.ones(24, HIDDEN)
    head.weights["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    check(folder, head.write(tmp_path / "3"), "eagle3")
    old = heads.eagle(target)
    old.spell = of_speculators
    check(folder, old.write(tmp_path / "1"), "eagle")
