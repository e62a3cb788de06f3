"""Families on a CUDA device: passes equal the CPU's, and one pass is one CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pilotfish_engine.model import load
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from tests.engine.model.paging import Paged, Piece
from tests.engine.model.tiny import MODELS, VARIANTS
from tests.gpu.test_kernels import moved

PREFIX, TREE = [5, 90, 71, 12, 8, 30, 44], Piece([9, 17, 23, 61], [-1, 0, 0, 2])


def on_device(inputs: ForwardInputs) -> ForwardInputs:
    assert inputs.only is None
    return ForwardInputs(
        token_ids=inputs.token_ids.cuda(),
        positions=inputs.positions.cuda(),
        slots=inputs.slots.cuda(),
        attention=moved(inputs.attention),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_pass_is_one_graph(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    MODELS[name].save_pretrained(tmp_path)
    paged = Paged(load(tmp_path, dtype), 1, max_len=32)
    whole = on_device(paged.inputs([Piece(PREFIX)]))
    paged.run([Piece(PREFIX)])
    inputs = paged.inputs([TREE])
    with torch.inference_mode():
        expected, _ = paged.decoder.forward(inputs, paged.kv)
        decoder = load(tmp_path, dtype, "cuda")
        kv: KVCache = decoder.new_kv_cache(num_pages=2, page_size=16)
        inputs = on_device(inputs)
        decoder.forward(whole, kv)
        eager, _ = decoder.forward(inputs, kv)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            decoder.forward(inputs, kv)  # warm-up: libraries make their workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, _ = decoder.forward(inputs, kv)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(captured, eager)
    if dtype is torch.float32:
        torch.testing.assert_close(eager.cpu(), expected, rtol=1e-4, atol=2e-4)
    else:
        near = torch.nn.functional.cosine_similarity(eager.cpu().float(), expected.float()) > 0.98
        assert near.float().mean() > 0.7
