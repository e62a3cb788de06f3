"""The matcher in C++, bound by ctypes, and the numbers that the search goes by. Knows CPU tensors and nothing of files.

`drafts` here and in ngram_tensors give the same candidates, number for number.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

from pilotfish_engine.errors import MethodError
from pilotfish_engine.speculation.tree import Candidates

MIN_NGRAM = 1  # on HumanEval answers 1.57 tokens a step against 1.47 with 2 and 1.39 with 3; the pass costs the same
MAX_NGRAM = 8
MAX_MATCHES = 16
NONE = -1  # no token: between the documents of a corpus


@dataclass(frozen=True)
class Corpus:
    """Texts to look continuations up in. tokens: int32 [N], documents with NONE between them, MAX_NGRAM times in front
    and MAX_NUM_STEPS times at the end. order: int32 [E], see `order_contexts`. Both on the device of the search."""

    tokens: torch.Tensor
    order: torch.Tensor


def matches_wanted(topk: int) -> int:
    """How many matches are merged: a method grows at most topk² nodes a depth, and so many places are reserved."""
    return min(MAX_MATCHES, topk * topk)


def width(topk: int, num_steps: int) -> int:
    """Columns of the candidates: `topk` first tokens, then one for each match at each depth."""
    return topk + (num_steps - 1) * matches_wanted(topk)


@cache
def _library() -> ctypes.CDLL:
    found = importlib.util.find_spec("pilotfish_engine.speculation._ngram")
    if found is None or found.origin is None:
        raise MethodError("the n-gram matcher was not built; reinstall pilotfish with a C++ compiler present")
    library = ctypes.CDLL(found.origin)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.ngram_drafts.argtypes = [
        *(pointer, number, pointer, pointer),
        *[number] * 6,
        *(pointer, pointer, number),
        *[pointer] * 3,
    ]
    library.ngram_drafts.restype = None
    library.ngram_order.argtypes = [pointer, number, number, pointer]
    library.ngram_order.restype = number
    return library


def load() -> None:
    """Raises MethodError where the matcher was not built."""
    _library()


def drafts(
    tokens: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor, topk: int, num_steps: int, corpus: Corpus | None
) -> Candidates:
    """Candidates [B, width] for `rows` int64 [B] of tokens int64 [R, L], of which seq_lens[row] + 1 are known."""
    shape = (rows.shape[0], width(topk, num_steps))
    token_ids = torch.empty(shape, dtype=torch.int64)
    parents = torch.empty(shape, dtype=torch.int64)
    scores = torch.empty(shape, dtype=torch.float32)
    _library().ngram_drafts(
        tokens.data_ptr(),
        tokens.stride(0),
        seq_lens.data_ptr(),
        rows.data_ptr(),
        shape[0],
        MIN_NGRAM,
        MAX_NGRAM,
        matches_wanted(topk),
        topk,
        num_steps,
        None if corpus is None else corpus.tokens.data_ptr(),
        None if corpus is None else corpus.order.data_ptr(),
        0 if corpus is None else corpus.order.shape[0],
        token_ids.data_ptr(),
        parents.data_ptr(),
        scores.data_ptr(),
    )
    return Candidates(token_ids, parents, scores)


def order_contexts(tokens: torch.Tensor) -> torch.Tensor:
    """Sorts the tokens by what stands before them. Indices of all that have one before them in their document, by
    the MAX_NGRAM tokens before them, the nearest first, and by index among equals. tokens: as in Corpus."""
    order = torch.empty_like(tokens)
    entries = _library().ngram_order(tokens.data_ptr(), tokens.shape[0], MAX_NGRAM, order.data_ptr())
    return order[:entries].clone()
