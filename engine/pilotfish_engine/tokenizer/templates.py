"""Which chat templates a checkpoint has, by name, and which two are used: `default`, and with tools `tool_use`.

Where they are looked for, and what comes first, is as in `transformers`; in a GGUF file as llama.cpp writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotfish_engine import files
from pilotfish_engine.tokenizer.chat import ChatTemplate

LONGEST = 1 << 20  # bytes of a template; the longest published ones have a twentieth
MOST = 64
_DEFAULT, _TOOLS = "default", "tool_use"


def folder_templates(path: Path, configured: Any) -> dict[str, str]:
    """Files of their own come before what tokenizer_config.json has; a processor's chat_template.json comes last."""
    more = "additional_chat_templates"
    names = sorted(file.name for file in (path / more).glob("*.jinja"))[:MOST]
    found = {name.removesuffix(".jinja"): _text(path, f"{more}/{name}") or "" for name in names}
    own = _text(path, "chat_template.jinja")
    if own is not None:
        found[_DEFAULT] = own
    if found:
        return found
    if not configured and (processors := files.find(path, "chat_template.json")) is not None:
        configured = files.read_json(processors).get("chat_template")
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


def _text(path: Path, name: str) -> str | None:
    file = files.find(path, name)
    return None if file is None else files.read_text(file, LONGEST)


def _by_name(configured: Any) -> dict[str, str]:
    if isinstance(configured, str):
        return {_DEFAULT: configured}
    if isinstance(configured, list):  # of {"name": …, "template": …}
        configured = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
    if not isinstance(configured, dict):
        return {}
    return {name: text for name, text in configured.items() if isinstance(name, str) and isinstance(text, str)}
