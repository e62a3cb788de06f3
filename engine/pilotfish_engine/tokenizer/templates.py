"""Which chat templates a checkpoint has, by name, and which two are used: `default`, and with tools `tool_use`.

Where they are looked for, and what comes first, is as in `transformers`; in a GGUF file as llama.cpp writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotfish_engine.tokenizer.chat import ChatTemplate

_DEFAULT, _TOOLS = "default", "tool_use"


def folder_templates(path: Path, configured: Any) -> dict[str, str]:
    """Files of their own come before what tokenizer_config.json has; a processor's chat_template.json comes last."""
    files = sorted((path / "additional_chat_templates").glob("*.jinja"))
    found = {file.stem: file.read_text(encoding="utf-8") for file in files}
    if (path / "chat_template.jinja").is_file():
        found[_DEFAULT] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    if found:
        return found
    processors = path / "chat_template.json"
    if not configured and processors.is_file():
        configured = json.loads(processors.read_text(encoding="utf-8")).get("chat_template")
    return _by_name(configured)


def gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """metadata: the keys behind `tokenizer.`"""
    prefix = "chat_template."
    found = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    if "chat_template" in metadata:
        found[_DEFAULT] = metadata["chat_template"]
    return {name: text for name, text in found.items() if isinstance(text, str)}


def chosen_template(templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """None where neither is there. Raises CheckpointError."""
    default = templates.get(_DEFAULT, templates.get(_TOOLS))
    return None if default is None else ChatTemplate(default, special_tokens, templates.get(_TOOLS))


def _by_name(configured: Any) -> dict[str, str]:
    if isinstance(configured, str):
        return {_DEFAULT: configured}
    if isinstance(configured, list):  # of {"name": …, "template": …}
        configured = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
    if not isinstance(configured, dict):
        return {}
    return {name: text for name, text in configured.items() if isinstance(name, str) and isinstance(text, str)}
