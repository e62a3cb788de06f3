"""Tiny Llama checkpoints made by the reference library, its greedy answers, and engines of every registered method."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish_engine.engine import Parts
from pilotfish_engine.speculation import registry
from tests.engine.conformance import harness

# models this small gain nothing from a second thread, and on a busy machine wait for it
torch.set_num_threads(1)

VOCAB = 64
EOS = 1
DRAFTS = ("equal", "random", "near")


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.6,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """target, and drafts: equal to it, random, and near it (the target's weights with a little noise)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    target, random, near = tiny(0), tiny(1), tiny(0)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in near.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    models = {"target": target, "equal": target, "random": random, "near": near}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return {name: folder / name for name in models}


@pytest.fixture(scope="session")
def reference(checkpoints: dict[str, Path]) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(checkpoints["target"], dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def greedy(reference: LlamaForCausalLM) -> Callable[..., list[int]]:
    """The reference library's own greedy answer, by whole recomputation; ends behind an end token unless told not
    to."""

    @cache
    def answer(prompt: tuple[int, ...], max_tokens: int, ignore_eos: bool = True) -> tuple[int, ...]:
        tokens = list(prompt)
        with torch.inference_mode():
            while len(tokens) < len(prompt) + max_tokens:
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
                if tokens[-1] == EOS and not ignore_eos:
                    break
        return tuple(tokens[len(prompt) :])

    return lambda prompt, max_tokens, ignore_eos=True: list(answer(tuple(prompt), max_tokens, ignore_eos))


def variants() -> list[tuple[str, str]]:
    """(method, draft) for every registered method: each draft model in turn where it needs one."""
    found = []
    for method in registry.methods():
        found += [(method.name, draft) for draft in DRAFTS] if method.needs_draft else [(method.name, "")]
    return found


@pytest.fixture(scope="session")
def engine(checkpoints: dict[str, Path]) -> Callable[..., Parts]:
    """Loaded once for each method, draft and page size."""

    @cache
    def load(method: str, draft: str, page_size: int) -> Parts:
        return harness.load(checkpoints["target"], method, checkpoints[draft] if draft else None, page_size)

    return load


def prompts(count: int, seed: int, shortest: int = 3, longest: int = 40) -> list[list[int]]:
    """Prompts of varied length; every other one repeats itself, so that n-grams are found."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    made = []
    for number in range(count):
        tokens = [draw(2, VOCAB) for _ in range(draw(shortest, longest))]
        made.append((tokens[: max(2, len(tokens) // 3)] * 3)[: len(tokens)] if number % 2 else tokens)
    return made
