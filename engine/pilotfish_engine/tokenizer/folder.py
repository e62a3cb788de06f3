"""The tokenizer of a Hugging Face folder: tokenizer.json, and beside it the chat template and the special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.tokenizer.chat import ChatTemplate
from pilotfish_engine.tokenizer.vocabulary import Tokenizer, byte_pieces

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_folder(path: Path) -> Tokenizer:
    """Raises CheckpointError when tokenizer.json is missing, damaged, or decodes other than byte by byte."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: tokenizer.json is missing; give a folder that has one")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{file}: not a tokenizer ({error}); give a folder with a whole one") from error
    decoder = _json(file).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        raise CheckpointError(f"{file}: its decoder is {decoder.get('type')!r}; 'ByteLevel' would work")
    settings = _json(path / "tokenizer_config.json")
    names = {name: text for name in _SPECIAL_NAMES if (text := _content(settings.get(name))) is not None}
    size = backend.get_vocab_size(with_added_tokens=True)
    tokens = [backend.id_to_token(i) or "" for i in range(size)]
    added = backend.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    template = _template_source(path, settings)
    return Tokenizer(
        backend=backend,
        pieces=byte_pieces(tokens, special),
        eos_token_ids=_eos_token_ids(path, backend, names.get("eos_token")),
        chat_template=None if template is None else ChatTemplate(template, names),
    )


def _template_source(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _eos_token_ids(path: Path, backend: Backend, eos_token: str | None) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        ids = _json(path / name).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    token_id = None if eos_token is None else backend.token_to_id(eos_token)
    return frozenset() if token_id is None else frozenset([token_id])


def _content(token: Any) -> str | None:
    """A special token is written as its text or as an object with it."""
    return token.get("content") if isinstance(token, dict) else token


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON ({error}); give a folder with whole files") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a JSON object; give a folder with whole files")
    return content
