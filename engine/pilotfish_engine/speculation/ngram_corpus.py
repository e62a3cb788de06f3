"""A corpus for drafts by matching: a file of texts, read and checked, and its index.

Knows nothing about requests or how a search goes. A corpus can only change how fast an answer comes, never the answer.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pilotfish_engine.contract.speculation import MAX_NUM_STEPS
from pilotfish_engine.errors import MethodError
from pilotfish_engine.speculation.ngram_matcher import MAX_NGRAM, NONE, Corpus, order_contexts

MAX_BYTES = 64 << 20  # a token of the corpus takes 8 bytes of memory, and 16 more while it is indexed
PIECE = 1 << 20  # characters tokenised at once: a tokenizer takes some hundred bytes a token while it works
FORMS = "UTF-8 text with a blank line between documents, or a .jsonl file with one string a line"


def read(path: Path) -> list[str]:
    """The documents of a file. Raises MethodError with one sentence where it is missing, too large, empty or of another
    form."""
    data = _bytes(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MethodError(f"the corpus {path} is not UTF-8 at byte {error.start}; give {FORMS}") from error
    if "\0" in text:
        raise MethodError(f"the corpus {path} is binary: byte {data.index(0)} is zero; give {FORMS}")
    documents = _strings(path, text) if path.suffix == ".jsonl" else _blocks(text)
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise MethodError(f"the corpus {path} has no text in it; give {FORMS}")
    return documents


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise MethodError(f"the corpus {path} is no file; give {FORMS}")
        if size > MAX_BYTES:
            raise MethodError(
                f"the corpus {path} has {size} bytes; at most {MAX_BYTES} ({MAX_BYTES >> 20} MiB) would work"
            )
        return path.read_bytes()
    except OSError as error:
        raise MethodError(f"the corpus {path} cannot be read ({error.strerror}); give {FORMS}") from error


def _blocks(text: str) -> list[str]:
    """Split at blank lines."""
    documents: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if line.strip():
            documents[-1].append(line)
        elif documents[-1]:
            documents.append([])
    return ["".join(lines) for lines in documents]


def _strings(path: Path, text: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, str):
                raise ValueError(f"{type(value).__name__} is no string")
            value.encode()  # half of a surrogate pair can be written in JSON and is no text
        except (ValueError, RecursionError) as error:
            raise MethodError(f"the corpus {path}, line {number}: {error}; give {FORMS}") from error
        documents.append(value)
    return documents


def index(documents: Sequence[str], encode: Callable[[str], Sequence[int]], device: torch.device) -> Corpus:
    """Tokenised with the target's `encode` and sorted on the CPU, then kept on `device`. Raises MethodError where no
    document has two tokens."""
    token_ids = array("i", [NONE] * MAX_NGRAM)
    for document in documents:
        for start in range(0, len(document), PIECE):
            token_ids.extend(encode(document[start : start + PIECE]))
        token_ids.append(NONE)
    token_ids.extend([NONE] * (MAX_NUM_STEPS - 1))
    tokens = torch.frombuffer(token_ids, dtype=torch.int32)
    order = order_contexts(tokens)
    if order.numel() == 0:
        raise MethodError("no document of the corpus has two tokens, so none follows another; longer texts would work")
    return Corpus(tokens.to(device, copy=True), order.to(device))
