"""The Triton kernels on a CUDA device: equal to their twins, one graph whatever the lengths, no word with the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pilotfish_engine import kernels
from pilotfish_engine.kernels import reference
from pilotfish_engine.kernels.inputs import AttentionInputs
from tests.engine.kernels.test_kernels import CASES, Case, attention_case, noise, within, words

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)
ALL = {
    **CASES,
    "one long row": Case(((20000, 1),), heads=32, kv_heads=8, dim=128),
    "a long tree": Case(((5000, 16), (4999, 7), (64, 1)), heads=32, kv_heads=8, dim=128, tree=True),
    "a long chunk": Case(((1000, 1500), (0, 300), (17, 1)), heads=8, kv_heads=2, dim=64, padding=40),
    "many requests": Case(tuple((number % 97, number % 3) for number in range(700)), heads=9, kv_heads=3),
    "wide heads": Case(((400, 20),), heads=8, kv_heads=1, dim=256, tree=True),
    "narrow heads": Case(((400, 20),), heads=2, kv_heads=2, dim=16),
}


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def moved(inputs: AttentionInputs) -> AttentionInputs:
    return AttentionInputs(
        page_table=inputs.page_table.cuda(),
        prefix_lens=inputs.prefix_lens.cuda(),
        q_indptr=inputs.q_indptr.cuda(),
        tree_mask=None if inputs.tree_mask is None else inputs.tree_mask.cuda(),
    )


def on_device(name: str, page_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, AttentionInputs]:
    q, k, v, inputs = attention_case(ALL[name], page_size, dtype)
    return q.cuda(), k.cuda(), v.cuda(), moved(inputs)


@contextmanager
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", ALL)
def test_attention(name: str, page_size: int, dtype: torch.dtype) -> None:
    q, k, v, inputs = on_device(name, page_size, dtype)
    expected = reference.paged_attention(q.double(), k.double(), v.double(), page_size, inputs, 0.3)
    assert not expected.isnan().any()
    close(kernels.paged_attention(q, k, v, page_size, inputs, 0.3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 3, 64, 300])
@pytest.mark.parametrize("name", ALL)
def test_a_window_hides_all_but_the_last_positions(name: str, window: int, dtype: torch.dtype) -> None:
    q, k, v, inputs = on_device(name, 16, dtype)
    read = torch.zeros(k.shape[0], dtype=torch.bool)
    table = inputs.page_table.cpu().long()
    for request, rows in within(attention_case(ALL[name], 16, dtype)[3], window):
        seen = torch.tensor(rows)
        read[table[request, seen // 16] * 16 + seen % 16] = True
    k[~read.cuda()], v[~read.cuda()] = torch.nan, torch.nan
    expected = reference.paged_attention(q.double(), k.double(), v.double(), 16, inputs, 0.3, window)
    assert not expected.isnan().any()
    close(kernels.paged_attention(q, k, v, 16, inputs, 0.3, window), expected)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("name", ["decode", "prefill", "tree", "padded", "one long row", "a long tree"])
def test_one_graph_serves_whatever_lengths_are_on_the_device(name: str, window: int | None) -> None:
    q, k, v, inputs = on_device(name, 16, torch.bfloat16)
    kernels.paged_attention(q, k, v, 16, inputs, 0.3, window)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_syncs():
        captured = kernels.paged_attention(q, k, v, 16, inputs, 0.3, window)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        close(captured, reference.paged_attention(q.double(), k.double(), v.double(), 16, inputs, 0.3, window))
        inputs.prefix_lens.sub_(inputs.prefix_lens // 3)  # every token sees fewer rows,
        inputs.q_indptr.clamp_(max=max(int(inputs.q_indptr[-1]) - 1, 0))  # and one token more is padding


def elementwise(dtype: torch.dtype, rows: int) -> list[tuple[str, list[Any]]]:
    """Calls and their arguments; those in float64 are what the twin computes from."""
    width, heads, kv_heads, dim = 576, 9, 3, 64
    x, residual = (noise(rows, width, dtype=dtype, seed=seed).cuda() for seed in (0, 1))
    weight = noise(width, dtype=dtype, seed=2).cuda()
    caches = [torch.full((4 * rows, kv_heads, dim), torch.nan, dtype=dtype, device="cuda") for _ in range(2)]
    qkv = noise(rows, (heads + 2 * kv_heads) * dim, dtype=dtype).cuda()
    places = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(0)).cuda()
    slots = torch.randperm(4 * rows, generator=torch.Generator().manual_seed(0))[:rows].cuda()
    return [
        ("rms_norm", [x, weight, 1e-5]),
        ("add_rms_norm", [x, residual, weight, 1e-5]),
        ("rope_and_write", [qkv, places, noise(50, dim, dtype=torch.float32).cuda(), slots, *caches]),
        ("silu_and_mul", [x * 30]),
        ("gelu_and_mul", [x * 3]),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 3000])
def test_small_kernels(dtype: torch.dtype, rows: int) -> None:
    for name, arguments in elementwise(dtype, rows):
        wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
        expected = getattr(reference, name)(*wide)
        getattr(kernels, name)(*[a.clone() if isinstance(a, Tensor) else a for a in arguments])  # compiled
        with no_syncs():
            found = getattr(kernels, name)(*arguments)
        if name == "add_rms_norm":
            found, expected = found[0], expected[0]
        close(found, expected)
        for written, exact in zip(arguments, wide, strict=True):
            if isinstance(written, Tensor) and written.is_floating_point():
                close(written, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (14336, 4096), (1024, 49152), (1152, 4099), (576, 1536)])
def test_products_of_few_rows(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight, offset = noise(outputs, inputs, dtype=dtype).cuda(), noise(outputs, dtype=dtype, seed=1).cuda()
    x = (noise(32, inputs, dtype=dtype, seed=2) / inputs**0.5).cuda()
    exact = reference.linear(x.double(), weight.double(), offset.double(), torch.float64)
    for rows in (1, 5, 16, 17, 32):
        kernels.linear(x[:rows], weight, offset)  # compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), no_syncs():
            found, wide = (kernels.linear(x[:rows], weight, offset, out) for out in (dtype, torch.float32))
        for _ in range(3):
            found.fill_(torch.nan), wide.fill_(torch.nan)
            graph.replay()
            close(found, exact[:rows])
            close(wide.to(dtype), exact[:rows])


@pytest.mark.parametrize("rows", [1, 7, 16, 30])
def test_kernels_that_begin_early_wait_for_what_they_read(rows: int) -> None:
    """A long chain, each link of which reads what the one before wrote, in a graph and by itself."""
    width, links = 2048, 40
    weights = [noise(2 * width, width, dtype=torch.bfloat16, seed=seed).cuda() / width**0.5 for seed in range(links)]
    norm = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    x = noise(rows, width, dtype=torch.bfloat16, seed=99).cuda()

    def chain() -> list[Tensor]:
        residual, found = x.clone(), [x]
        for weight in weights:
            normed, residual = kernels.add_rms_norm(found[-1], residual, norm, 1e-5)
            found.append(kernels.silu_and_mul(kernels.linear(normed, weight)))
        return found

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    one_by_one = chain()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(50):
        for link in captured[1:]:
            link.fill_(torch.nan)
        graph.replay()
        for found, expected in zip(captured, one_by_one, strict=True):
            assert torch.equal(found, expected)
    residual = x.clone()
    for place, weight in enumerate(weights):  # each link by its twin, from what the link before gave
        normed, residual = reference.add_rms_norm(one_by_one[place], residual, norm, 1e-5)
        exact = reference.silu_and_mul(reference.linear(normed.double(), weight.double(), None, torch.float64))
        torch.testing.assert_close(one_by_one[place + 1].double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("rows", "length", "k"), [(1, 49152, 8), (4, 4864, 4), (300, 32000, 1), (7, 151936, 8)])
def test_the_best_of_each_row(rows: int, length: int, k: int) -> None:
    x = 5 * noise(rows, length, dtype=torch.float32).cuda()
    expected, places = reference.top_log_probs(x.double(), k)
    kernels.top_log_probs(x, k)  # compiled
    with no_syncs():
        scores, found = kernels.top_log_probs(x, k)
    close(scores, expected)
    assert torch.equal(found, places)


@pytest.mark.parametrize(("rows", "length"), [(1, 49152), (64, 49423), (300, 151936)])
def test_what_is_ruled_out(rows: int, length: int) -> None:
    x, allowed = noise(rows, length, dtype=torch.float32), words(rows, length)
    expected = reference.rule_out(x, allowed)
    x, allowed = x.cuda(), allowed.cuda()
    kernels.rule_out(x, allowed)  # compiled
    with no_syncs():
        found = kernels.rule_out(x, allowed)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_rounded_before_its_norm(dtype: torch.dtype) -> None:
    _, (x, residual, weight, eps) = elementwise(dtype, 50)[1]
    total = (x.float() + residual.float()).to(dtype)
    normed, summed = kernels.add_rms_norm(x, residual, weight, eps)
    assert torch.equal(summed, total)
    close(normed, reference.rms_norm(total.double(), weight.double(), eps))
