"""How families of models write calls of tools: one file each, and here their list, most telling first.

A format knows the chat templates that show it, reads calls from an answer's text, and spells them as a grammar.
"""

from __future__ import annotations

from collections.abc import Mapping

from pilotfish_engine.server.tool_formats import (
    deepseek,
    fenced,
    glm,
    harmony,
    hermes,
    kimi,
    lists,
    llama,
    mistral,
    qwen_coder,
)
from pilotfish_engine.server.tool_formats.format import Format, Specials, Spelling

FORMATS: tuple[Format, ...] = (
    harmony.FORMAT,
    deepseek.FORMAT,
    kimi.FORMAT,
    mistral.FORMAT,
    glm.FORMAT,
    qwen_coder.FORMAT,
    lists.PHI,
    lists.GRANITE,
    fenced.OLMO,
    hermes.FORMAT,
    fenced.GEMMA,
    llama.PYTHON,
    llama.JSON,
)
BY_NAME: Mapping[str, Format] = {name: each for each in FORMATS for name in (each.name, *each.aliases)}


def detected(template: str) -> Format | None:
    """None: the template shows no tools, or its model writes calls in another way."""
    return next((each for each in FORMATS if each.knows(template)), None)


__all__ = ["BY_NAME", "FORMATS", "Format", "Specials", "Spelling", "detected"]
