"""The matrix: greedy answers of every family × without a draft, by n-grams, by a head × one process, two ranks equal
the reference library's. And under trees of a draft that is near, so that accepted rows move in every kind of cache.

Heads are random: a tree of theirs is accepted now and then, and mostly not.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish_engine.engine import assemble
from pilotfish_engine.model.mtp import FORMS, HeadSet
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsCheckpoint
from pilotfish_engine.scheduler.scheduler import Scheduler
from tests.engine.conformance import harness, twins
from tests.engine.conformance.conftest import prompts
from tests.engine.conformance.harness import Harness, configuration, fixed
from tests.engine.conformance.models import Pair
from tests.engine.conformance.test_ranks import PROFILE, Group, group
from tests.engine.model.tiny import MODELS, SMALL

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

CHUNK, NUM_STEPS, TOPK = 24, 3, 4
# of each family the model, and the form of its heads where its checkpoints bring some along; shards or one file
FAMILIES: dict[str, tuple[str, str | None]] = {
    "Llama, untied": ("untied", None),
    "Llama, tied": ("tied", None),
    "Llama, yarn": ("yarn rope, by weights", None),
    "Llama, dynamic": ("dynamic rope", None),
    "Mistral": ("mistral", None),
    "Mistral, window": ("mistral, window", None),
    "Qwen2": ("qwen2", None),
    "Qwen2, windows": ("qwen2, windows", None),
    "MiMo": ("qwen2", "MiMo"),
    "Qwen3": ("qwen3", None),
    "Gemma-3": ("gemma3", None),
    "Gemma-3, untied": ("gemma3, untied and biased", None),
    "Qwen3-MoE": ("qwen3 moe", None),
    "Qwen3-Next": ("qwen3 next", "Qwen3-Next"),
    "GLM-4.5": ("glm4 moe", "NextN"),
    "DeepSeek-V2": ("deepseek v2, groups", None),
    "DeepSeek-V3": ("deepseek v3", "NextN"),
}
ROWS = [
    (family, method)
    for family, (_, form) in FAMILIES.items()
    for method in ("None", "NGRAM", "EAGLE3" if form is None else "MTP")
]


def saved(folder: Path, family: str) -> Path:
    name, form = FAMILIES[family]
    sharded = list(FAMILIES).index(family) % 2 == 1
    MODELS[name].save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    if form is None:
        return folder
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), "num_nextn_predict_layers": 1}
    if form == "MiMo":
        config["architectures"] = ["MiMoForCausalLM"]
    file.write_text(json.dumps(config))
    heads = HeadSet(next(f for f in FORMS if f.name == form), 1, SafetensorsCheckpoint(folder).shape)
    weights = random(heads.tensors())
    if not sharded:
        own = load_file(folder / "model.safetensors")
        save_file(own | weights, folder / "model.safetensors")
        return folder
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"] |= dict.fromkeys(weights, "heads.safetensors")
    index_file.write_text(json.dumps(index))
    save_file(weights, folder / "heads.safetensors")
    return folder


def random(sizes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(6)
    return {name: 0.3 * torch.randn(size) + float(len(size) == 1) for name, size in sizes.items()}


def head(folder: Path) -> Path:
    """An EAGLE-3 head of one Llama layer, which fits every target of these sizes."""
    hidden, inner, kv = SMALL["hidden_size"], SMALL["intermediate_size"], SMALL["hidden_size"] // 2
    layer = {
        "self_attn.q_proj": (hidden, 2 * hidden),
        "self_attn.k_proj": (kv, 2 * hidden),
        "self_attn.v_proj": (kv, 2 * hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (hidden,)),
    }
    sizes = {f"midlayer.{name}.weight": size for name, size in layer.items()}
    sizes |= {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (SMALL["vocab_size"], hidden),
    }
    config = {
        **SMALL,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": SMALL["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random(sizes), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, twin: Callable[..., str]) -> Callable[[str, str], Pair]:
    folder = tmp_path_factory.mktemp("families")
    target = cache(lambda family: saved(folder / family, family))
    draft = head(folder / "head")

    @cache
    def made(family: str, method: str) -> Pair:
        files = Pair(target(family), draft if method == "EAGLE3" else None)
        return twins.twin(files, twin(family, method), folder / f"{family} {method}")

    return made


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One pair of ranks for the whole matrix."""
    with group(tmp_path_factory.mktemp("ranks"), "honest") as made:
        yield made


@pytest.fixture(scope="module")
def accepted() -> Iterator[dict[str, list[int]]]:
    """The drafted tokens that each row accepted, by method: none in some rows, but not in all."""
    found: dict[str, list[int]] = {method: [] for _, method in ROWS}
    yield found
    for method, counts in found.items():
        if len(counts) == 2 * sum(method == other for _, other in ROWS):
            assert (sum(counts) > 0) == (method != "None"), f"{method} accepted {sum(counts)}"


def is_greedy(family: str, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of the answer is the reference library's first choice behind what is before it."""
    with torch.inference_mode():
        logits = MODELS[FAMILIES[family][0]](torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return bool((logits.argmax(dim=1) == torch.tensor(answer)).all())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("family", "method"), ROWS)
def test_answers_are_the_reference_library_s(
    pair: Callable[[str, str], Pair],
    accepted: dict[str, list[int]],
    request: pytest.FixtureRequest,
    family: str,
    method: str,
    size: int,
) -> None:
    """In chunks, the first prompt once more behind its own answer, all with others beside them."""
    files = pair(family, method)
    if size == 1:
        parts = assemble(configuration(files.target, method, files.draft, 16, NUM_STEPS, TOPK), PROFILE)
    else:
        two: Group = request.getfixturevalue("two")
        two.written(0)
        parts = two.load(files, method, NUM_STEPS, TOPK)
    engine = Harness(parts)
    engine.scheduler = Scheduler(engine.worker, CHUNK, None, overlap=False)
    if method != "None":
        engine.scheduler.set_envelope(fixed(NUM_STEPS, TOPK))
    asked = prompts(2, seed=71, shortest=20)
    (first,) = engine.run(asked[:1], max_tokens=6, ignore_eos=True)
    again = [asked[0] + first, *asked[1:]]
    ids = [engine.submit(prompt, max_tokens=10, ignore_eos=True) for prompt in again]
    engine.drain()
    assert engine.answers[ids[0]].last.cached_tokens >= 16  # type: ignore[union-attr]
    answers = [first, *(engine.answers[i].token_ids for i in ids)]
    for prompt, answer in zip([asked[0], *again], answers, strict=True):
        assert is_greedy(family, prompt, answer)
    steps = [result.committed() for _, result in engine.worker.steps]
    accepted[method].append(sum(len(tokens) - 1 for step in steps for tokens in step))
    if size == 2:
        assert two.written(len(steps)) == steps


@pytest.mark.parametrize(
    "name", ["mistral, window", "qwen3", "gemma3", "deepseek v3", "glm4 moe", "qwen3 moe", "qwen3 next"]
)
def test_trees_change_no_answer(name, tmp_path, twin):
    model = MODELS[name]
    near = copy.deepcopy(model)
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in near.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    model.save_pretrained(tmp_path / "target")
    near.save_pretrained(tmp_path / "near")
    files = twins.twin(Pair(tmp_path / "target", tmp_path / "near"), twin(name), tmp_path / "twin")
    engine = Harness(harness.load(files.target, "STANDALONE", files.draft, 16))
    engine.scheduler.set_envelope(fixed(4, 4))
    asked = prompts(3, seed=71)
    answers = engine.run(asked, max_tokens=20, ignore_eos=True)
    for prompt, answer in zip(asked, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(dim=1).tolist() == answer
    accepted = [length for _, result in engine.worker.steps for length in result.accept_lens]
    assert max(accepted) > 2, "no path was long enough to be moved"
