"""Rule 2: sampled answers have the target's distribution, and a seed gives the same tokens in any batch, by any
method."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engine.conformance.conftest import VOCAB, prompts, settings_of
from tests.engine.conformance.harness import MAX_RUNNING, NUM_STEPS, Harness, fixed

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


def reference_probs(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """float64 [V], by sorting and dropping one token at a time; independent of the engine's code."""
    probs = torch.softmax(logits.double() / temperature, dim=0).tolist()
    ranked = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = ranked[: top_k or len(ranked)]
    total, before, nucleus = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        if before < top_p * total:
            nucleus.append(i)
        before += probs[i]
    nucleus = [i for i in nucleus if probs[i] >= min_p * probs[ranked[0]]]
    mass = sum(probs[i] for i in nucleus)
    return {i: probs[i] / mass for i in nucleus}


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 1), (NUM_STEPS, 4)]))
def test_a_seed_gives_the_tokens_of_plain_decoding(engine, method, draft, num_steps, topk):
    batch = prompts(MAX_RUNNING, seed=11)
    params = [{"temperature": 0.5 + 0.2 * i, "seed": 100 + i, **FILTERS[i % len(FILTERS)]} for i in range(len(batch))]
    plain = Harness(engine(method, draft, 16))
    plain.scheduler.set_envelope(fixed(0, 1))
    alone = []
    for prompt, values in zip(batch, params, strict=True):  # one at a time: the seed does not depend on the batch
        alone += plain.run([prompt], max_tokens=20, ignore_eos=True, **values)
    harness = Harness(engine(method, draft, 16), chunk_size=7, overlap=topk == 4)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    ids = [
        harness.submit(p, max_tokens=20, ignore_eos=True, **values) for p, values in zip(batch, params, strict=True)
    ]
    harness.drain()
    assert [harness.answers[i].token_ids for i in ids] == alone


@pytest.mark.parametrize("filters", [FILTERS[0], FILTERS[4]])
@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 2)], "equal", "random"))
def test_three_tokens_have_the_joint_distribution_of_the_target(
    engine, reference, method, draft, num_steps, topk, filters
):
    """χ² over the likeliest outcomes against exact enumeration; seeds are fixed, so the verdict is too."""
    prompt, temperature, samples = [9, 4, 9, 4, 9], 0.8, 600
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown: dict[tuple[int, ...], float] = {}
        likely = sorted(expected, key=lambda path: -expected[path])[:60]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + list(path) for path in likely])).logits[:, -1]
        for path, row in zip(likely, logits, strict=True):
            for token, p in reference_probs(row, temperature, **filters).items():
                grown[(*path, token)] = expected[path] * p
        expected = grown
    harness = Harness(engine(method, draft, 16))
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    drawn = [
        tuple(harness.answers[i].token_ids)
        for block in (range(at, at + 60) for at in range(0, samples, 60))
        for i in _answer(harness, prompt, block, temperature, filters)
    ]
    bins = [path for path in expected if expected[path] * samples >= 8]
    assert len(bins) >= 5
    rest = 1 - sum(expected[path] for path in bins)
    observed = [drawn.count(path) for path in bins]
    counts = [(n, expected[path] * samples) for n, path in zip(observed, bins, strict=True)]
    if rest * samples >= 8:
        counts.append((samples - sum(observed), rest * samples))
    chi2 = sum((n - mean) ** 2 / mean for n, mean in counts)
    freedom = len(counts) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 4  # far beyond the 99.9th percentile
    impossible = {path for path in drawn if any(not 0 <= token < VOCAB for token in path)}
    assert not impossible


def _answer(harness, prompt, seeds, temperature, filters):
    ids = [
        harness.submit(prompt, max_tokens=3, ignore_eos=True, temperature=temperature, seed=seed * 7919 + 1, **filters)
        for seed in seeds
    ]
    harness.drain()
    return ids
