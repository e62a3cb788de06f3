"""Reasoning in the form that clients hand back unread: `encrypted_content`.

Nothing is secret here, as the same reasoning stands in `content`; some clients hand back nothing else.
"""

from __future__ import annotations

import base64

_MARK = b"pilotfish:"


def sealed(text: str) -> str:
    return base64.b64encode(_MARK + text.encode()).decode()


def opened(content: str) -> str | None:
    """None: it is not of this engine's making."""
    try:
        found = base64.b64decode(content, validate=True)
        return found.removeprefix(_MARK).decode() if found.startswith(_MARK) else None
    except ValueError:
        return None
