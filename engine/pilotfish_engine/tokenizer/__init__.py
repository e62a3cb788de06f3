"""Text ↔ tokens for one checkpoint: encode, decode token by token, stop strings, the chat template.

Torch-free. Knows nothing about HTTP, requests or the model: `load` reads a GGUF file or a checkpoint folder.
"""

from __future__ import annotations

from pathlib import Path

from pilotfish_engine.tokenizer.chat import ChatTemplate, TemplateError
from pilotfish_engine.tokenizer.folder import load_folder
from pilotfish_engine.tokenizer.gguf_tokenizer import load_gguf
from pilotfish_engine.tokenizer.text import Detokenizer, StopStrings, held_back
from pilotfish_engine.tokenizer.vocabulary import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "TemplateError", "Tokenizer", "held_back", "load"]


def load(path: Path) -> Tokenizer:
    """Reads the tokenizer of a resolved model (source.resolve). Raises CheckpointError when there is no usable one."""
    return load_folder(path) if path.is_dir() else load_gguf(path)
