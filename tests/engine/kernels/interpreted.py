"""Each Triton kernel, in Triton's interpreter, against its plain-torch twin in float64. Run by test_triton.py."""

from __future__ import annotations

import pytest
import torch

from pilotfish_engine.kernels import reference
from pilotfish_engine.kernels.cuda import attention, elementwise, linear, matching, ruling, top
from tests.engine.kernels.test_kernels import Case, attention_case, close, noise, tolerance, within, words

DTYPES = [torch.float32, torch.float16]  # the interpreter rounds to bfloat16 by cutting
# page size and dtype of each, and as many programs as the device is said to have: rows are split among more than one
CASES = {
    "decode": (Case(((0, 1), (63, 1), (130, 1), (5, 0)), heads=6, kv_heads=2, dim=32), 16, torch.float32, 1),
    "decode, split": (Case(((0, 1), (63, 1), (300, 1), (5, 0)), heads=3, kv_heads=1), 64, torch.float16, 16),
    "chunk": (Case(((0, 40), (70, 9), (3, 1)), heads=4, kv_heads=1), 16, torch.float16, 1),
    "chunk, split, padded": (Case(((150, 9),), heads=2, kv_heads=2, dim=80, padding=3), 1, torch.float32, 4),
    "tree": (Case(((0, 1), (1, 64), (63, 5), (100, 17)), heads=4, kv_heads=1, tree=True), 16, torch.float16, 1),
    "tree, split, padded": (Case(((190, 3), (0, 0)), heads=8, kv_heads=1, tree=True, padding=2), 64, torch.float32, 9),
    "one page a row": (Case(((20, 8),), heads=8, kv_heads=1, dim=128, tree=True), 1, torch.float16, 1),
    "many heads": (Case(((17, 2),), heads=32, kv_heads=1, dim=24), 16, torch.float16, 1),
    "wide heads": (Case(((40, 3),), heads=2, kv_heads=1, dim=256), 16, torch.float16, 1),
    "all padding": (Case(((9, 0), (3, 0)), heads=2, kv_heads=1, dim=16, padding=6), 16, torch.float32, 1),
    "many requests": (
        Case(tuple((number % 5, int(number % 9 == 0)) for number in range(140)), heads=1, kv_heads=1, dim=16),
        16,
        torch.float32,
        1,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 100), (70, 64), (2, 5000), (0, 64)])
def test_norms(dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual, weight = (noise(*size, dtype=dtype, seed=i) for i, size in enumerate([(rows, width)] * 2 + [(width,)]))
    close(elementwise.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
    total = (x.float() + residual.float()).to(dtype)
    normed, summed = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert summed is residual
    assert torch.equal(summed, total)
    close(normed, reference.rms_norm(total.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 128, 1), (3, 512, 70), (16, 384, 33), (19, 256, 65)])
def test_products_of_few_rows(rows: int, inputs: int, outputs: int, bias: bool, out_dtype: torch.dtype) -> None:
    x, weight = noise(rows, inputs, dtype=torch.float16) / inputs**0.5, noise(outputs, inputs, dtype=torch.float16)
    offset = noise(outputs, dtype=torch.float16, seed=1) if bias else None
    found = linear.linear(x, weight, offset, out_dtype)
    assert found.dtype is out_dtype
    exact = reference.linear(x.double(), weight.double(), None if offset is None else offset.double(), torch.float64)
    close(found.half(), exact)
    alone = torch.cat([linear.linear(row[None], weight, offset, out_dtype) for row in x])
    assert torch.equal(found, alone), "a row has the same bits alone and in a batch"


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gates(name: str, dtype: torch.dtype) -> None:
    for rows in (0, 1, 5):
        x = noise(rows, 2 * 1100, dtype=dtype) * 30
        x[:1, :3] = torch.tensor([-500.0, 500.0, 0.0])
        close(getattr(elementwise, name)(x), getattr(reference, name)(x.double()))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(("rows", "length", "k"), [(1, 1, 1), (3, 70, 4), (2, 4096, 1), (2, 9000, 8), (0, 64, 2)])
def test_the_best_of_each_row(rows: int, length: int, k: int) -> None:
    x = 5 * noise(rows, length, dtype=torch.float32)
    expected, places = reference.top_log_probs(x.double(), k)
    scores, found = top.top_log_probs(x, k)
    close(scores, expected)
    assert torch.equal(found, places)
    x[:, : length // 2] = x[:, length // 2 : length // 2 * 2]  # twins: the first of them comes first, and both come
    _, found = top.top_log_probs(x, k)
    order = x.sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(found, order)
    x.fill_(torch.nan)  # padding
    _, found = top.top_log_probs(x, k)
    assert bool(((found >= 0) & (found < length)).all())


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 70), (2, 9000), (1, 4096), (0, 64)])
def test_what_is_ruled_out(rows: int, length: int) -> None:
    x, allowed = noise(rows, length, dtype=torch.float32), words(rows, length)
    found = ruling.rule_out(x, allowed)
    assert torch.equal(found, reference.rule_out(x, allowed))
    bits = allowed[:, torch.arange(length) // 32] >> (torch.arange(length, dtype=torch.int32) % 32) & 1
    assert torch.equal(found, torch.where(bits == 1, x, -torch.inf))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 70), (2, 9000), (0, 64)])
def test_matched_rows(dtype: torch.dtype, rows: int, length: int) -> None:
    logits, wanted = 5 * noise(rows, length, dtype=dtype), noise(rows, length, dtype=dtype, seed=1).abs() / length
    weights = torch.arange(rows, dtype=torch.float32)  # of the first: none
    exact = logits.double()
    expected = reference.match_rows(exact, wanted.double(), weights.double())
    close(matching.match_rows(logits, wanted, weights), expected)
    close(logits, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), [(1, 9, 3, 64), (7, 4, 4, 16), (5, 8, 1, 128), (3, 0, 3, 80)]
)
def test_rope_writes_its_slots_and_no_other(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    qkv = noise(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    positions, slots = torch.randint(0, 50, (tokens,), generator=generator), torch.randperm(100, generator=generator)
    table = noise(50, dim, dtype=torch.float32)
    caches = [torch.full((100, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    exact = [cache.double() for cache in caches]
    q = elementwise.rope_and_write(qkv, positions, table, slots[:tokens], caches[0], caches[1])
    close(q, reference.rope_and_write(qkv.double(), positions, table.double(), slots[:tokens], exact[0], exact[1]))
    for found, expected in zip(caches, exact, strict=True):
        torch.testing.assert_close(found.double(), expected, equal_nan=True, **tolerance(dtype))


def attends(name: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    case, page_size, dtype, programs = CASES[name]
    monkeypatch.setattr(attention, "PROGRAMS", programs)
    q, k, v, inputs = attention_case(case, page_size, dtype)
    if window is not None:
        read = torch.zeros(k.shape[0], dtype=torch.bool)
        for request, rows in within(inputs, window):
            pages = inputs.page_table[request].long()[torch.tensor(rows) // page_size]
            read[pages * page_size + torch.tensor(rows) % page_size] = True
        k[~read], v[~read] = torch.nan, torch.nan
    expected = reference.paged_attention(q.double(), k.double(), v.double(), page_size, inputs, 0.3, window)
    assert not expected.isnan().any()
    close(attention.paged_attention(q, k, v, page_size, inputs, 0.3, window), expected)


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attends(name, None, monkeypatch)


@pytest.mark.parametrize(
    ("name", "window"),
    [("decode", 64), ("decode, split", 100), ("chunk", 3), ("chunk, split, padded", 100), ("tree", 3), ("tree", 64)],
)
def test_a_window_hides_all_but_the_last_positions(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attends(name, window, monkeypatch)


def test_rows_are_split_only_where_programs_are_few() -> None:
    """Of an H200's: 32 requests of 8 KV heads fill it, a single one does not, and short rows are not worth it."""
    splits = [
        attention.tiling(requests, requests, 4, 8, 128, max_rows, wide=False).splits
        for requests, max_rows in ((64, 4096), (32, 4096), (8, 4096), (1, 4096), (1, 512), (1, 16))
    ]
    assert splits == [1, 1, 4, 32, 4, 1]
