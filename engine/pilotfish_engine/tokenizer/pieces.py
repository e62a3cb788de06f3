"""Reads off what each token adds to a text, in bytes. A text is the UTF-8 of their concatenation.

What a decoder makes of a token inside a text is asked of the library; only single bytes, which the library shows as
U+FFFD, are told apart here: the alphabet of a byte-level vocabulary, and the tokens `<0xE4>` of one with byte fallback.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders

KNOWN = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")  # those that read token by token
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnknownDecoderError(ValueError):
    """Token by token this decoder cannot be followed; the text says which one it is."""


@dataclass(frozen=True)
class Pieces:
    """inside[id]: a token's bytes within a text, empty for special ones. opening: of those that have others where a
    text begins, mostly without their space. fallback: single bytes are tokens of their own."""

    inside: tuple[bytes, ...]
    opening: Mapping[int, bytes]
    fallback: bool


def read_pieces(decoder: decoders.Decoder | None, tokens: Sequence[str | None], special: Collection[int]) -> Pieces:
    """tokens[id]: None where there is none. Raises UnknownDecoderError."""
    steps = list(_steps(None if decoder is None else json.loads(decoder.__getstate__())))
    names = [step.get("type") for step in steps]
    _check(steps, names)
    shown = [None if i in special else token for i, token in enumerate(tokens)]
    if "ByteLevel" in names:
        return Pieces(tuple(b"" if token is None else _of_alphabet(token) for token in shown), {}, False)
    assert decoder is not None
    fallback = "ByteFallback" in names
    texts = _inside(decoder, [token or "" for token in shown])
    inside = [text.encode() for text in texts]
    opening: dict[int, bytes] = {}
    opens = any(name in ("Strip", "Metaspace") for name in names)
    for i, token in enumerate(shown):
        if not token:
            continue
        byte = _BYTE.fullmatch(token) if fallback else None
        if byte is not None:
            inside[i] = bytes.fromhex(byte[1])
        if opens and b" " in inside[i]:
            first = decoder.decode([token]).encode()
            if first != inside[i]:
                opening[i] = first
    return Pieces(tuple(inside), opening, fallback)


def _steps(state: Any) -> Iterator[Mapping[str, Any]]:
    if state is None:
        return
    if state.get("type") == "Sequence":
        for inner in state["decoders"]:
            yield from _steps(inner)
    else:
        yield state


def _check(steps: Sequence[Mapping[str, Any]], names: Sequence[Any]) -> None:
    unknown = [name for name in names if name not in KNOWN]
    if unknown or not names:
        raise UnknownDecoderError(f"its decoder is {unknown[0] if unknown else None!r}; {_known()}")
    if "ByteLevel" in names and set(names) - {"ByteLevel", "Fuse"}:
        raise UnknownDecoderError(f"its decoder is {' and '.join(map(str, names))}; ByteLevel alone would work")
    fused = False
    for step in steps:
        fused = fused or step["type"] == "Fuse"
        pattern = step.get("pattern", {}).get("String")
        if fused and step["type"] == "Replace" and (pattern is None or len(pattern) != 1):
            raise UnknownDecoderError("its decoder replaces over the ends of tokens; a Replace before Fuse would work")
        if fused and step["type"] == "Strip" and step.get("stop"):
            raise UnknownDecoderError("its decoder strips the end of a text; a Strip of its start would work")


def _known() -> str:
    return f"one of {', '.join(map(repr, KNOWN))}, or a Sequence of them, would work"


def _inside(decoder: decoders.Decoder, tokens: Sequence[str]) -> list[str]:
    """What the decoder makes of each token between two others."""
    used = frozenset("".join(tokens))
    mark = next(mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in used)  # for private use
    marked = [mark]
    for token in tokens:
        marked += (token, mark)
    texts = decoder.decode(marked).split(mark)[1:-1]
    if len(texts) != len(tokens):
        raise UnknownDecoderError("its decoder drops tokens; one that shows each would work")
    return texts


def _of_alphabet(token: str) -> bytes:
    """Of a byte-level vocabulary (GPT-2): each character stands for a byte; a token with another one for its UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def as_alphabet(piece: bytes) -> str:
    """A token of a byte-level vocabulary, as its file writes it."""
    return piece.decode("latin-1").translate(_CHARACTER_OF)


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 bytes are themselves; the other 68, in order, are the characters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}
