"""`python -m benchmarks.gpu_kernels`: the Triton kernels' times on this CUDA device, within a CUDA graph.

Beside each stands a plain copy of as many bytes (read and written together): the floor of what reads its rows once.
Every call of a graph has other rows than the call before, as the layers of a model have, and all are more than the
device's L2 cache holds. Attention's bytes are the K and V rows that its requests have; prompt chunks, which do more
arithmetic than reading, also say how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish_engine import kernels
from pilotfish_engine.kernels.inputs import AttentionInputs

COLD = 256 << 20  # bytes that a graph's calls go through at least
MAX_LAYERS = 32
REPLAYS = 5
ROW = "{:<52} {:>9} {:>9} {:>7} {:>7}"


@dataclass(frozen=True)
class Attention:
    """tokens: of each request, a tree's nodes or (chunk) a part of its prompt; context: rows before them."""

    requests: int
    context: int
    tokens: int = 1
    page_size: int = 16
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    chunk: bool = False
    ragged: bool = False  # contexts of 1/8 … 15/8 of it

    def __str__(self) -> str:
        kind = f"{'chunk' if self.chunk else 'tree'} of {self.tokens}" if self.tokens > 1 else "decode"
        context = f"~{self.context}" if self.ragged else str(self.context)
        heads = f"{self.heads}/{self.kv_heads}x{self.dim}"
        return f"{self.requests} x {context}, {kind}, {heads}, page {self.page_size}"


ATTENTION = [
    Attention(32, 4096, 16),
    Attention(32, 4096, 16, page_size=64),
    Attention(32, 4096, 4),
    Attention(32, 4096),
    Attention(32, 4096, ragged=True),
    Attention(128, 2048, 4),
    Attention(64, 640),
    Attention(256, 640),
    Attention(1, 32768, 16),
    Attention(1, 4096, 4),
    Attention(1, 640),
    Attention(8, 512, 4),
    Attention(2048, 450, heads=9, kv_heads=3, dim=64),
    Attention(1, 450, heads=9, kv_heads=3, dim=64),
    Attention(1, 2048, 2048, chunk=True),
    Attention(4, 0, 512, heads=9, kv_heads=3, dim=64, chunk=True),
]
WIDTHS = (4096, 14336, 32, 8, 128)  # hidden, inner, heads, KV heads, head: of the 8B shape


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Of one of these, replayed one after another as one graph; the best of some replays."""
    calls[0]()  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / len(calls))
    return best


def copying(size: int, layers: int) -> float:
    pairs = [torch.empty(2, max(size // 2, 1), dtype=torch.uint8, device="cuda") for _ in range(layers)]
    return microseconds([lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs])  # type: ignore[misc]


def layers_of(size: int) -> int:
    return max(2, min(MAX_LAYERS, -(-COLD // size)))


def line(name: str, took: float, size: int, note: str = "") -> None:
    floor = copying(size, layers_of(size))
    print(ROW.format(name, f"{took:.1f}", f"{floor:.1f}", f"{took / floor:.2f}", f"{size / took / 1e6:.2f}"), note)


def inputs_of(case: Attention) -> AttentionInputs:
    """Pages in no order; trees are binary."""
    tokens = case.requests * case.tokens
    last = 2 * case.context if case.ragged else case.context
    pages = -(-(last + max(case.tokens, 64)) // case.page_size)
    table = torch.randperm(case.requests * pages, device="cuda").view(case.requests, pages)
    spread = torch.linspace(0.125, 1.875, case.requests, device="cuda") if case.ragged else 1
    masks = [1]
    for node in range(1, 1 if case.chunk else case.tokens):
        masks.append(masks[(node - 1) // 2] | 1 << node)
    return AttentionInputs(
        page_table=table.to(torch.int32),
        prefix_lens=(torch.full((case.requests,), case.context, device="cuda") * spread).to(torch.int32),
        q_indptr=torch.arange(0, tokens + 1, case.tokens, dtype=torch.int32, device="cuda"),
        tree_mask=None if case.chunk else torch.tensor(masks, device="cuda").repeat(case.requests),
    )


def attention(case: Attention) -> None:
    inputs = inputs_of(case)
    numbers = case.kv_heads * case.dim
    size = 4 * numbers * (int(inputs.prefix_lens.sum()) + case.requests * case.tokens)
    slots = inputs.page_table.numel() * case.page_size
    rows = [torch.randn(2, slots, case.kv_heads, case.dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    rows += [rows[0].clone() for _ in range(layers_of(size) - 2)]
    q = torch.randn(case.requests * case.tokens, case.heads, case.dim, device="cuda", dtype=torch.bfloat16)

    def call(kv: Tensor) -> Callable[[], object]:
        return lambda: kernels.paged_attention(q, kv[0], kv[1], case.page_size, inputs, case.dim**-0.5)

    took = microseconds([call(kv) for kv in rows])
    seen = case.requests * (case.tokens * case.context + case.tokens**2 // 2)
    arithmetic = f"{4 * seen * case.heads * case.dim / took / 1e6:.0f} TFLOP/s" if case.chunk else ""
    line(str(case), took, size, arithmetic)


def small(tokens: int) -> None:
    """Norms, rotation and gate of one layer."""
    hidden, inner, heads, kv_heads, dim = WIDTHS
    qkv_width = (heads + 2 * kv_heads) * dim
    layers = layers_of(4 * tokens * hidden)

    def noise(width: int) -> list[Tensor]:
        return [torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]

    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    places = torch.arange(tokens, device="cuda")
    table = torch.randn(tokens, dim, device="cuda")
    x, residual, qkv, gate_up = noise(hidden), noise(hidden), noise(qkv_width), noise(2 * inner)
    cache = torch.empty(2, tokens, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    runs: list[tuple[str, int, Callable[[int], object]]] = [
        ("rms_norm", 4 * hidden, lambda i: kernels.rms_norm(x[i], weight, 1e-5)),
        ("add_rms_norm", 8 * hidden, lambda i: kernels.add_rms_norm(x[i], residual[i], weight, 1e-5)),
        ("rope_and_write", 4 * qkv_width, lambda i: kernels.rope_and_write(qkv[i], places, table, places, *cache)),
        ("silu_and_mul", 6 * inner, lambda i: kernels.silu_and_mul(gate_up[i])),
    ]
    for name, size, run in runs:
        took = microseconds([lambda i=i, run=run: run(i) for i in range(layers)])  # type: ignore[misc]
        line(f"{name}, {tokens} tokens", took, tokens * size)


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(ROW.format("", "us", "copy us", "x copy", "TB/s"))
    with torch.inference_mode():
        for case in ATTENTION:
            attention(case)
        for tokens in (1, 64, 2048):
            small(tokens)


if __name__ == "__main__":
    main()
