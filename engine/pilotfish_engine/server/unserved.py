"""Fields of OpenAI's API that are not served yet: accepted when they ask for nothing, else refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

_NOTHING = (None,)

# field: the values that ask for nothing beyond what is done anyway
IN_REQUESTS: Mapping[str, tuple[Any, ...]] = {
    "audio": _NOTHING,
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": _NOTHING,
    "presence_penalty": (None, 0),
    "reasoning_effort": _NOTHING,
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": _NOTHING,
    "web_search_options": _NOTHING,
}
# Clients send an answer's message back as part of the next question, with these fields in it.
IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": _NOTHING,
    "function_call": _NOTHING,
    "refusal": _NOTHING,
    "tool_calls": (None, []),
}


def without_unserved(body: Any, unserved: Mapping[str, tuple[Any, ...]]) -> Any:
    """The body without those of its fields that ask for nothing. Raises PydanticCustomError (type `field`)."""
    if not isinstance(body, dict):
        return body
    for field in body.keys() & unserved.keys():
        harmless = unserved[field]
        if body[field] not in harmless:
            value = next((value for value in harmless if value is not None), None)
            advice = f"leave it out, or give {value!r}" if value is not None else "leave it out"
            raise PydanticCustomError("field", "is not served yet; {advice}", {"field": field, "advice": advice})
    return {field: value for field, value in body.items() if field not in unserved}
