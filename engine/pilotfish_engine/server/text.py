"""Text and JSON values as clients send them: well-formed, or refused.

JSON can escape half a surrogate pair, which is no text: no tokenizer takes it and no answer can repeat it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

MAX_NESTING = 100  # objects and lists within each other


def well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogate", "half a surrogate pair is no character; whole ones would work") from None
    return text


def why_no_json(value: Any) -> str | None:
    """Python reads more than JSON: NaN, and halves of surrogate pairs. And what is nested without end nobody can
    use."""
    if _deeper(value, MAX_NESTING):
        return f"it is nested deeper than {MAX_NESTING} levels"
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        return str(error)[:100]
    return None


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_deeper(part, levels - 1) for part in inner)


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    reason = why_no_json(value)
    if reason is not None:
        raise PydanticCustomError("json", "it is no JSON ({reason}); what is would work", {"reason": reason})
    return value


Text = Annotated[str, AfterValidator(well_formed)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_as_json)]
