"""The suite's fixtures: the reference library's greedy answers, and engines of every registered method."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pilotfish_engine.engine import Parts
from pilotfish_engine.speculation import registry
from tests.engine.conformance import harness, models, twins
from tests.engine.conformance.models import EOS, VOCAB

# models this small gain nothing from a second thread, and on a busy machine wait for it
torch.set_num_threads(1)

__all__ = ["EOS", "VOCAB", "prompts", "settings_of", "variants"]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    models.target_model().save_pretrained(folder)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "models whose rows are not their tokenizer's tokens: each engine as one of its twins, or as all in turn"
    parser.addoption("--twins", choices=["rotated", "all"], default="rotated", help=words)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "twin" in metafunc.fixturenames and metafunc.config.getoption("--twins", "rotated") == "all":
        metafunc.parametrize("twin", twins.TWINS, indirect=True, scope="session")


@pytest.fixture(scope="session")
def twin(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Which twin a variant is."""
    fixed: str | None = getattr(request, "param", None)
    return twins.rotated if fixed is None else lambda *_: fixed


@pytest.fixture(scope="session")
def checkpoints(
    target: Path, tmp_path_factory: pytest.TempPathFactory, twin: Callable[..., str]
) -> Callable[..., models.Pair]:
    """Target and draft of a variant, as the twin that an engine of this page size gets."""
    folder = tmp_path_factory.mktemp("drafts")
    made = cache(lambda method, draft: models.build(method, draft, target, folder))

    @cache
    def twinned(method: str, draft: str, kind: str) -> models.Pair:
        return twins.twin(made(method, draft), kind, folder / f"{method} {draft} {kind}")

    return lambda method, draft, page_size=16: twinned(method, draft, twin(method, draft, page_size))


@pytest.fixture(scope="session")
def reference(target: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


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


def variants(*without: str) -> list[tuple[str, str]]:
    """(method, draft) for every registered method with each of its drafts, but for some levels."""
    return [(method.name, draft) for method in registry.methods() for draft in models.drafts(method.name, *without)]


def settings_of(steps_and_topk: list[tuple[int, int]], *without: str) -> list[tuple[str, str, int, int]]:
    """(method, draft, num_steps, topk): each variant with each of the settings that its method can do, once."""
    found: dict[tuple[str, str, int, int], None] = {}
    for method, draft in variants(*without):
        for num_steps, topk in steps_and_topk:
            found[(method, draft, *models.within(method, draft, num_steps, topk))] = None
    return list(found)


@pytest.fixture(scope="session")
def engine(checkpoints: Callable[..., models.Pair]) -> Callable[..., Parts]:
    """Loaded once for each variant and page size."""

    @cache
    def load(method: str, draft: str, page_size: int) -> Parts:
        pair = checkpoints(method, draft, page_size)
        num_steps, topk = models.within(method, draft, harness.NUM_STEPS, 4)
        return harness.load(pair.target, method, pair.draft, page_size, num_steps, topk)

    return load


def prompts(count: int, seed: int, shortest: int = 4, longest: int = 40) -> list[list[int]]:
    """Prompts of varied length that begin with tokens nobody sees; every other one repeats itself, so that n-grams are
    found."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    made = []
    for number in range(count):
        tokens = [draw(2, VOCAB) for _ in range(draw(shortest, longest) - models.UNSEEN)]
        repeated = (tokens[: max(1, len(tokens) // 3)] * 4)[: len(tokens)]
        made.append([0] * models.UNSEEN + (repeated if number % 2 else tokens))
    return made
