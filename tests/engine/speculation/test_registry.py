"""Which method a configuration means, by name or by what the checkpoints hold, and what is refused before any weight is
read."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish_engine.contract.methods import Limits, Method
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.engine import assemble
from pilotfish_engine.errors import MethodError, UsageError
from pilotfish_engine.model.loading import read_shape
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsFolder
from pilotfish_engine.speculation import registry
from pilotfish_engine.speculation.proposer import Models
from tests.engine.conformance import models
from tests.engine.conformance.harness import configuration
from tests.engine.conformance.models import Pair

KNOWN = {method.name: method for method in registry.methods()}
VARIANTS = [(name, draft) for name in KNOWN for draft in models.drafts(name, "near", "equal")]
Pairs = Callable[[str, str], Pair]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    folder = tmp_path_factory.mktemp("registry")
    models.target_model().save_pretrained(folder / "target")
    return cache(lambda method, draft: models.build(method, draft, folder / "target", folder))


@pytest.fixture
def only_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: SafetensorsFolder, name: str) -> None:
        raise AssertionError(f"{name} of {folder.path} was read")

    monkeypatch.setattr(SafetensorsFolder, "read", refuse)


@pytest.fixture
def own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered from here on is forgotten when the test ends."""
    for table in ("_METHODS", "_MODULES"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))


# this module's own method: it recognises nothing, and all settings suit it


def recognises(models: Models) -> bool:
    return False


def check(models: Models) -> Limits:
    return Limits()


def judged(target: Path, draft: Path | None, corpus: Path | None = None) -> Models:
    return Models(target, read_shape(target), draft, lambda other, size: None, corpus)


def meant(name: str, target: Path, draft: Path | None) -> str | None:
    method = registry.resolve(name, judged(target, draft))
    return None if method is None else method.name


# --- by what the checkpoints hold


@pytest.mark.parametrize(("method", "draft"), VARIANTS)
def test_auto_is_the_method_of_the_checkpoints(pairs, only_metadata, method, draft):
    pair = pairs(method, draft)
    assert meant("Auto", pair.target, pair.draft) == method
    assert meant(method, pair.target, pair.draft) == method
    assert meant("None", pair.target, None) is None
    num_steps, topk = models.within(method, draft, 4, 4)
    envelope = Envelope(num_steps=num_steps, topk=topk, num_draft_tokens=10)
    assert registry.judge(KNOWN[method], judged(pair.target, pair.draft)).misfit(envelope) is None


@pytest.mark.parametrize(("method", "draft"), VARIANTS)
def test_nobody_else_takes_a_head_for_its_own(pairs, method, draft):
    """But for what drafts without a checkpoint, and the small model, which is whatever is no head."""
    pair = pairs(method, draft)
    asked = judged(pair.target, pair.draft)
    of_heads = [m for m in KNOWN.values() if m.preference > 1]
    claimed = [m.name for m in of_heads if registry.load(m).recognises(asked)]
    assert claimed == ([method] if KNOWN[method] in of_heads else [])


def test_a_draft_that_is_given_comes_before_the_target_s_own_heads(pairs):
    target = pairs("MTP", "random").target
    assert meant("Auto", target, None) == "MTP"
    for method in ("EAGLE", "EAGLE3", "DFLASH", "STANDALONE"):
        assert meant("Auto", target, pairs(method, "random").draft) == method


def test_a_draft_that_nobody_knows(pairs, tmp_path, only_metadata):
    target = pairs("NGRAM", "").target
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    for name, sentence in (
        ("empty", r"the folder .*empty has no config.json; give a folder, a .gguf file, or .*"),
        ("other", r"architecture BertModel is not supported; supported are .*LlamaForCausalLM"),
    ):
        with pytest.raises(UsageError, match=sentence):
            assemble(configuration(target, "Auto", tmp_path / name, 16, 4, 1))


@pytest.mark.parametrize("method", ["Auto", "STANDALONE"])
def test_a_part_of_a_model_is_refused_before_the_target_is_read(pairs, tmp_path, only_metadata, method):
    """Heads that came with another model, say: a folder with a model's config and some of its tensors."""
    pair = pairs("STANDALONE", "random")
    assert pair.draft is not None
    tensors = load_file(pair.draft / "model.safetensors")
    (tmp_path / "config.json").write_text((pair.draft / "config.json").read_text())
    save_file(
        {name: tensor for name, tensor in tensors.items() if ".layers.0." not in name}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UsageError, match=r"tensor model\.layers\.0\..* is missing; .*a complete checkpoint would work"):
        assemble(configuration(pair.target, method, tmp_path, 16, 4, 1))


def test_auto_asks_the_surest_method_first_and_some_never(pairs, own_methods, monkeypatch):
    target = pairs("NGRAM", "").target
    asked: list[str] = []

    def recognises(name: str, models: Models) -> bool:
        asked.append(name)
        return False

    for name, preference in (("LAST", 1), ("NEVER", 0), ("FIRST", 9)):
        module = types.ModuleType(name)
        module.__dict__["recognises"] = partial(recognises, name)
        monkeypatch.setitem(sys.modules, f"asked_{name}", module)
        registry.register(Method(name, "for a test", preference=preference), f"asked_{name}")
    assert meant("Auto", target, None) == "NGRAM"
    assert asked == ["FIRST"]  # it recognises nothing, and among equals the older one is asked first
    assert meant("NEVER", target, None) == "NEVER"
    draft = pairs("STANDALONE", "random").draft
    asked.clear()
    assert meant("Auto", target, draft) == "STANDALONE"
    assert asked == []  # they take no draft


def test_auto_with_a_corpus_beside_a_draft(pairs, tmp_path):
    pair = pairs("EAGLE", "random")
    with pytest.raises(
        MethodError, match=r"the draft .*EAGLE random, with the corpus .*texts.* one of None, Auto, NGRAM"
    ):
        registry.resolve("Auto", judged(pair.target, pair.draft, tmp_path / "texts"))


# --- by name


@pytest.mark.parametrize(
    ("name", "draft", "sentence"),
    [
        ("None", "d", r"method None takes no draft, but the draft is 'd'; leave it out or name a method"),
        ("NGRAM", "d", r"method NGRAM takes no draft, but the draft is 'd'; leave it out"),
        ("ngram", None, r"method 'ngram' is unknown; one of None, Auto, NGRAM, .* would work"),
        *[
            (name, None, rf"method {name} needs a draft model, and none is given; add --draft")
            for name, method in KNOWN.items()
            if method.needs_draft
        ],
    ],
)
def test_names_that_contradict_the_draft(name, draft, sentence):
    with pytest.raises(MethodError, match=sentence):
        registry.check(name, draft)


@pytest.mark.parametrize("name", registry.names())
def test_names_that_do_not(name):
    method = KNOWN.get(name)
    if method is None or not method.needs_draft:
        registry.check(name, None)
    if name == "Auto" or (method is not None and method.takes_draft):
        registry.check(name, "d")


def test_names_are_given_once(own_methods):
    assert registry.names() == ("None", "Auto", *KNOWN)
    for name in registry.names():
        with pytest.raises(MethodError, match=f"method {name!r} is registered already; choose another name"):
            registry.register(Method(name, "for a test"), "somewhere")


# --- settings that the method or its checkpoint cannot do


def few_tokens(pair: Pair, folder: Path) -> Pair:
    """The same head with a vocabulary of four tokens."""
    assert pair.draft is not None
    folder.mkdir()
    tensors = load_file(pair.draft / "model.safetensors")
    for name in ("lm_head.weight", "d2t"):
        tensors[name] = tensors[name][:4].contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((pair.draft / "config.json").read_text()) | {"draft_vocab_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return Pair(pair.target, folder)


@pytest.mark.parametrize(
    ("drafting", "beyond", "sentence", "within"),
    [
        (("MTP", "3 random"), (4, 1), r"num_steps is 4, .* holds 3 MTP heads, .* at most 3 would work", (3, 1)),
        (("MTP", "3 random"), (3, 2), r"topk is 2, .* 3 MTP heads, .* at most 1 would work", (3, 1)),
        (("DFLASH", "random"), (6, 1), r"num_steps is 6, .* blocks of 6 tokens, .* at most 5 would work", (5, 1)),
        (("EAGLE3", "few"), (4, 5), r"topk is 5, .* knows 4 tokens; .*4 would work", (4, 4)),
        (("CHAINS", ""), (4, 2), r"topk is 2, but CHAINS drafts chains; at most 1 would work", (4, 1)),
    ],
)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.usefixtures("own_methods", "only_metadata")
def test_settings_beyond_the_method(pairs, tmp_path, drafting, beyond, sentence, within, named):
    """Refused before a weight is read; what would work goes on to reading them."""
    method, draft = drafting
    registry.register(Method("CHAINS", "for a test", trees=False), __name__)
    if not named and method == "CHAINS":
        pytest.skip("Auto never asks it")
    pair = pairs("NGRAM", "") if method == "CHAINS" else pairs(method, "random" if draft == "few" else draft)
    pair = few_tokens(pair, tmp_path / "few") if draft == "few" else pair
    name = method if named else "Auto"
    with pytest.raises(MethodError, match=sentence):
        assemble(configuration(pair.target, name, pair.draft, 16, *beyond))
    with pytest.raises(AssertionError, match="was read"):
        assemble(configuration(pair.target, name, pair.draft, 16, *within))


@pytest.mark.parametrize(("method", "draft"), [v for v in VARIANTS if KNOWN[v[0]].needs_draft])
def test_a_draft_of_another_target(pairs, tmp_path, only_metadata, method, draft):
    """Every method refuses a draft of another vocabulary, before a weight is read."""
    found = pairs(method, draft).draft
    assert found is not None
    torch.manual_seed(0)
    larger = models.target_model()
    larger.resize_token_embeddings(models.VOCAB + 8)
    larger.save_pretrained(tmp_path / "larger")
    with pytest.raises(
        MethodError, match=rf"{found.name} has a vocabulary of {models.VOCAB} tokens and the target larger"
    ):
        assemble(configuration(tmp_path / "larger", "Auto", found, 16, 4, 1))
