"""Reads the tokenizer of a resolved model, whatever it comes in."""

from __future__ import annotations

from pathlib import Path

from pilotfish_engine.tokenizer.folder import load_folder
from pilotfish_engine.tokenizer.gguf_tokenizer import load_gguf
from pilotfish_engine.tokenizer.vocabulary import Tokenizer


def load(path: Path) -> Tokenizer:
    """The tokenizer of a resolved model (source.resolve). Raises CheckpointError when there is no usable one."""
    return load_folder(path) if path.is_dir() else load_gguf(path)
