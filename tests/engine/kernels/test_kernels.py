"""Each C++ kernel against its plain-torch twin in float64, with poisoned caches and ragged shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pilotfish_engine import kernels
from pilotfish_engine.kernels import cpu, reference
from pilotfish_engine.kernels.backend import Implementation
from pilotfish_engine.kernels.inputs import AttentionInputs

DTYPES = [torch.float32, torch.bfloat16]


def tolerance(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, **tolerance(found.dtype))


def noise(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def words(rows: int, length: int, seed: int = 0) -> Tensor:
    """A bit for each of so many tokens."""
    limit = torch.iinfo(torch.int32)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(limit.min, limit.max, (rows, -(-length // 32)), dtype=torch.int32, generator=generator)


def test_the_kernels_were_built() -> None:
    assert set(DTYPES) == cpu.DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 100), (70, 576), (0, 64)])
def test_norms(dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual, weight = (noise(*size, dtype=dtype, seed=i) for i, size in enumerate([(rows, width)] * 2 + [(width,)]))
    close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
    total = (x.float() + residual.float()).to(dtype)
    normed, summed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    close(normed, reference.rms_norm(total.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (576, 160), (80, 36), (48, 33)])
def test_linear(dtype: torch.dtype, bias: bool, inputs: int, outputs: int) -> None:
    weight, offset = noise(outputs, inputs, dtype=dtype), noise(outputs, dtype=dtype, seed=1) if bias else None
    for tokens in (0, 1, 2, 5, 6, 9, 16, 17, 32, 33, 70):
        x = noise(tokens, inputs, dtype=dtype, seed=2) / inputs**0.5
        exact = reference.linear(
            x.double(), weight.double(), None if offset is None else offset.double(), torch.float64
        )
        close(kernels.linear(x, weight, offset), exact)
        wide = kernels.linear(x, weight, offset, torch.float32)
        assert wide.dtype is torch.float32
        close(wide.to(dtype), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 160), (80, 36)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    weight, x = noise(outputs, inputs, dtype=dtype), noise(39, inputs, dtype=dtype, seed=2)
    alone = torch.cat([kernels.linear(row[None], weight) for row in x])
    for tokens in (2, 3, 4, 5, 6, 16, 17, 32, 39):
        assert torch.equal(kernels.linear(x[:tokens], weight), alone[:tokens])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 90])
def test_gate(dtype: torch.dtype, rows: int) -> None:
    x = noise(rows, 2 * 500, dtype=dtype) * 30
    x[0, :3] = torch.tensor([-1e4, 1e4, 0.0])
    close(kernels.silu_and_mul(x), reference.silu_and_mul(x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(1, 9, 3, 64), (40, 4, 4, 16), (64, 8, 1, 128)])
def test_rope_writes_its_slots_and_no_other(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    qkv = noise(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions, slots = torch.randint(0, 50, (tokens,)), torch.randperm(100)[:tokens]
    table = noise(50, dim, dtype=torch.float32)
    caches = [torch.full((100, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    exact = [cache.double() for cache in caches]
    q = kernels.rope_and_write(qkv, positions, table, slots, caches[0], caches[1])
    close(q, reference.rope_and_write(qkv.double(), positions, table.double(), slots, exact[0], exact[1]))
    for found, expected in zip(caches, exact, strict=True):
        torch.testing.assert_close(found.double(), expected, equal_nan=True, **tolerance(dtype))


@dataclass(frozen=True)
class Case:
    """(prefix rows, own tokens) of each request."""

    requests: tuple[tuple[int, int], ...]
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    tree: bool = False
    padding: int = 0


CASES = {
    "decode": Case(((0, 1), (63, 1), (64, 1), (300, 1), (5, 0))),
    "prefill": Case(((0, 130), (70, 33), (200, 1))),
    "many heads": Case(((17, 9), (129, 2)), heads=32, kv_heads=1, dim=128),
    "wide": Case(((40, 40),), heads=2, kv_heads=2, dim=80),
    "tree": Case(((0, 1), (1, 64), (63, 5), (100, 17), (190, 3)), tree=True),
    "padded": Case(((3, 4), (66, 2), (0, 0)), tree=True, padding=5),
    "odd heads": Case(((20, 3),), heads=4, kv_heads=2, dim=24),
}


def attention_case(case: Case, page_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, AttentionInputs]:
    """Queries, caches with NaN in every row that no token may see, and the inputs."""
    prefixes, counts = zip(*case.requests, strict=True)
    real = sum(counts)
    pages = -(-max(prefix + count for prefix, count in case.requests) // page_size) + 1
    order = torch.randperm(len(counts) * pages, generator=torch.Generator().manual_seed(1)) + 1
    table = order.view(len(counts), pages).int()
    k, v = (torch.full(((order.numel() + 1) * page_size, case.kv_heads, case.dim), torch.nan) for _ in range(2))
    masks = [random_tree(count) if case.tree else [] for count in counts]
    for request, (prefix, count) in enumerate(case.requests):
        rows = torch.arange(prefix + count)
        slots = table[request].long()[rows // page_size] * page_size + rows % page_size
        for seed, cache in enumerate((k, v)):
            cache[slots] = noise(len(rows), case.kv_heads, case.dim, dtype=torch.float32, seed=seed * 100 + request)
        table[request, -(-(prefix + count) // page_size) :] = 10**8  # unused: must not be followed
    flat = [mask for request in masks for mask in request] + [0] * case.padding
    tokens = real + case.padding
    inputs = AttentionInputs(
        page_table=table,
        prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        q_indptr=torch.tensor([0, *counts]).cumsum(0).int(),
        tree_mask=torch.tensor(flat) if case.tree else None,
    )
    return noise(tokens, case.heads, case.dim, dtype=dtype, seed=5), k.to(dtype), v.to(dtype), inputs


def random_tree(nodes: int) -> list[int]:
    """Ancestor masks, as signed 64-bit integers."""
    masks = [1][:nodes]
    for node in range(1, nodes):
        parent = int(torch.randint(0, node, (1,), generator=torch.Generator().manual_seed(node)))
        masks.append(masks[parent] | 1 << node)
    return [mask - 2**64 if mask >= 2**63 else mask for mask in masks]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, page_size: int, dtype: torch.dtype) -> None:
    q, k, v, inputs = attention_case(CASES[name], page_size, dtype)
    expected = reference.paged_attention(q.double(), k.double(), v.double(), page_size, inputs, 0.3)
    assert not expected.isnan().any()
    close(kernels.paged_attention(q, k, v, page_size, inputs, 0.3), expected)


def within(inputs: AttentionInputs, window: int) -> list[tuple[int, list[int]]]:
    """Of each token its request and the rows that it sees, counted one by one."""
    found = []
    for request, prefix in enumerate(inputs.prefix_lens.tolist()):
        begin, end = inputs.q_indptr[request : request + 2].tolist()
        for number in range(end - begin):
            path = list(range(number + 1))
            if inputs.tree_mask is not None:
                path = [node for node in range(64) if int(inputs.tree_mask[begin + number]) >> node & 1]
            found.append((request, [*range(prefix), *(prefix + node for node in path)][-window:]))
    return found


@pytest.mark.parametrize("window", [1, 3, 64, 100])
@pytest.mark.parametrize("name", CASES)
def test_a_window_hides_all_but_the_last_positions(name: str, window: int) -> None:
    q, k, v, inputs = attention_case(CASES[name], 16, torch.float32)
    seen = within(inputs, window)
    read = torch.zeros(k.shape[0], dtype=torch.bool)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for token, (request, rows) in enumerate(seen):
        slots = torch.tensor([int(inputs.page_table[request, row // 16]) * 16 + row % 16 for row in rows])
        read[slots] = True
        keys, values = (c[slots].double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for c in (k, v))
        weights = torch.softmax(torch.einsum("hd,lhd->hl", q[token].double(), keys) * 0.3, dim=1)
        expected[token] = torch.einsum("hl,lhd->hd", weights, values)
    k[~read], v[~read] = torch.nan, torch.nan
    for backend in (kernels, reference):
        found = backend.paged_attention(q, k, v, 16, inputs, 0.3, window)
        close(found[: len(seen)], expected[: len(seen)])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_under_verification_has_the_bits_of_single_tokens(dtype: torch.dtype, window: int | None) -> None:
    prefix, chain = 61, 9
    q, k, v, inputs = attention_case(Case(((prefix, chain),)), 16, dtype)
    together = kernels.paged_attention(q, k, v, 16, inputs, 0.3, window)
    masked = replace(inputs, tree_mask=torch.tensor([(1 << i + 1) - 1 for i in range(chain)]))
    assert torch.equal(kernels.paged_attention(q, k, v, 16, masked, 0.3, window), together)
    for i in range(chain):
        alone = replace(
            inputs,
            prefix_lens=torch.tensor([prefix + i], dtype=torch.int32),
            q_indptr=torch.tensor([0, 1], dtype=torch.int32),
        )
        assert torch.equal(kernels.paged_attention(q[i : i + 1], k, v, 16, alone, 0.3, window), together[i : i + 1])


def test_a_strided_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="strides"):
        kernels.silu_and_mul(noise(8, 8, dtype=torch.float32).t())


def test_what_no_kernel_takes_is_the_twin_s() -> None:
    """Of types and shapes; where a kernel takes the call its arguments are checked, and nowhere else."""
    x, weight = noise(3, 48, dtype=torch.float64), noise(33, 48, dtype=torch.float64)
    assert torch.equal(kernels.linear(x, weight), reference.linear(x, weight, None, x.dtype))
    strided = noise(48, 3, dtype=torch.float32).t()
    assert torch.equal(
        kernels.linear(strided, weight.float()), reference.linear(strided, weight.float(), None, torch.float32)
    )
    with pytest.raises(TypeError, match="strides"):
        kernels.linear(strided, noise(32, 48, dtype=torch.float32))


def test_a_second_kernel_of_an_operation_has_its_own_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for decoding alone, beside the one for all: a function, and a word in the backend."""
    calls: list[int] = []

    def takes(
        q: Tensor, k: Tensor, v: Tensor, page_size: int, inputs: AttentionInputs, scale: float, window: int | None
    ) -> bool:
        return inputs.tree_mask is None and q.shape[0] == inputs.page_table.shape[0]

    def one_token_each(
        q: Tensor, k: Tensor, v: Tensor, page_size: int, inputs: AttentionInputs, scale: float, window: int | None
    ) -> Tensor:
        calls.append(inputs.plan("lengths", lambda: len(calls)))
        rows = inputs.prefix_lens.tolist()
        out = torch.empty_like(q)
        for request, length in enumerate(rows):
            at = torch.arange(length + 1)
            slots = inputs.page_table[request].long()[at // page_size] * page_size + at % page_size
            keys, values = (c[slots].repeat_interleave(q.shape[1] // c.shape[1], dim=1) for c in (k, v))
            weights = torch.softmax(torch.einsum("hd,lhd->hl", q[request], keys) * scale, dim=1)
            out[request] = torch.einsum("hl,lhd->hd", weights, values)
        return out

    more = replace(cpu.BACKEND, paged_attention=(Implementation(one_token_each, takes), *cpu.BACKEND.paged_attention))
    monkeypatch.setattr(kernels, "ATTENTION", replace(kernels.ATTENTION, backends={"cpu": lambda: more}))
    for name, is_decode in (("all decode", True), ("prefill", False), ("tree", False)):
        case = Case(((0, 1), (63, 1), (300, 1))) if is_decode else CASES[name]
        q, k, v, inputs = attention_case(case, 16, torch.float32)
        for layer in range(2):
            found = kernels.paged_attention(q, k, v, 16, inputs, 0.3)
            close(found, reference.paged_attention(q.double(), k.double(), v.double(), 16, inputs, 0.3))
            assert len(calls) == (layer + 1 if is_decode else 2), name
    assert calls == [0, 0], "what is planned for a batch is planned once for its layers"
