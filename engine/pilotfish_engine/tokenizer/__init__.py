"""Text ↔ tokens for one checkpoint: encode, decode token by token, stop strings, the chat template.

Torch-free. Knows nothing about HTTP, requests or the model: `load` reads a GGUF file or a checkpoint folder.
"""

from __future__ import annotations

from pilotfish_engine.tokenizer.chat import ChatTemplate, TemplateError
from pilotfish_engine.tokenizer.loading import load
from pilotfish_engine.tokenizer.text import Detokenizer, StopStrings, held_back
from pilotfish_engine.tokenizer.vocabulary import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "TemplateError", "Tokenizer", "held_back", "load"]
