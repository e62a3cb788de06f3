"""What becomes of bytes and of JSON when somebody hostile has had them: one change or several, by a seeded choice."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

NUMBERS = (0, 1, 2, 7, 255, 1 << 31, (1 << 32) - 1, 1 << 61, 1 << 63, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 10**9, 1 << 31, 1 << 62, 1 << 64, 10**400, 0.5, -0.0, 1e-300, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "../../etc/passwd", "/dev/zero", "\x00", "\n\nTraceback"),
    *("é\u2028", "x" * 5000, [], {}, [None], ["x"] * 200, [0, -1, 1 << 40], {"": {}}, {"type": "x"}, [[[[]]]]),
)
DEEP = 3000


def bytes_mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        _change(changed, rng)
    return bytes(changed)


def _change(data: bytearray, rng: random.Random) -> None:
    """Rather near the beginning, where a format keeps what it says of itself."""
    reach = rng.choice((32, 300, 3000, len(data) or 1))
    at = rng.randrange(max(1, min(reach, len(data))))
    length = rng.choice((1, 4, 8, 40))
    match rng.randrange(7):
        case 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        case 1 | 2:
            width = rng.choice((4, 8))
            data[at : at + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        case 3:
            del data[at:]
        case 4:
            del data[at : at + length]
        case 5:
            data[at:at] = data[at : at + length]
        case 6:
            data[at:at] = rng.randbytes(length)


def json_mutated(value: Any, rng: random.Random) -> str:
    """As text, which may be more than a parser likes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            break
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict) and len(holder) > 1:
                holder[rng.choice([*holder]) + rng.choice(("", "x"))] = holder.pop(key, None)
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(value)
    match rng.randrange(12):
        case 0:
            return "[" * DEEP + text
        case 1:
            return text.replace("{", '{"a": ' + '{"a":' * DEEP + "1" + "}" * DEEP + ", ", 1)
        case 2:
            at = rng.randrange(len(text))
            return text[:at] + rng.choice(("", "}", '"', "\\u0000", "9" * 5000)) + text[at + 1 :]
    return text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in it that can be changed; of long lists only some."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        inner = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, part in inner[:: 1 + len(inner) // 100]:
        yield value, key
        yield from _places(part)
