"""Fields that clients send and that are not served: accepted when they ask for nothing, else refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

_NOTHING = (None,)

# field: the values that ask for nothing beyond what is done anyway
IN_REQUESTS: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": _NOTHING,
    "audio": _NOTHING,
    "bad_words": (None, []),
    "chat_template": _NOTHING,
    "documents": _NOTHING,
    "ebnf": _NOTHING,
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "include_stop_str_in_output": (None, False),
    "json_schema": _NOTHING,
    "length_penalty": (None, 1),
    "modalities": (None, ["text"]),
    "moderation": _NOTHING,
    "prediction": _NOTHING,
    "prompt_cache_options": _NOTHING,
    "prompt_logprobs": _NOTHING,
    "reasoning_effort": _NOTHING,
    "regex": _NOTHING,
    "service_tier": (None, "auto", "default"),
    "skip_special_tokens": (None, True),
    "store": (None, False),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "verbosity": _NOTHING,
    "web_search_options": _NOTHING,
}
# Clients send an answer's message back as part of the next question, with these fields in it.
IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": _NOTHING,
    "function_call": _NOTHING,
    "refusal": _NOTHING,
}
_INSTEAD: Mapping[str, str] = {
    "ebnf": "structured_outputs with a grammar would work",
    "function_call": "tool_choice, or tool_calls in a message, would work",
    "functions": "tools would work",
    "guided_choice": "structured_outputs with a choice would work",
    "guided_grammar": "structured_outputs with a grammar would work",
    "guided_json": "response_format, or structured_outputs with json, would work",
    "guided_regex": "structured_outputs with a regex would work",
    "json_schema": "response_format would work",
    "regex": "structured_outputs with a regex would work",
}


def without_unserved(
    body: Any, unserved: Mapping[str, tuple[Any, ...]], instead: Mapping[str, str] = _INSTEAD
) -> Any:
    """The body without those of its fields that ask for nothing. instead: what to do for a field that does. Raises
    PydanticCustomError (type `field`)."""
    if not isinstance(body, dict):
        return body
    for field in sorted(body.keys() & unserved.keys()):
        harmless = unserved[field]
        if body[field] not in harmless:
            value = next((value for value in harmless if value is not None), None)
            advice = f"leave it out, or give {value!r}" if value is not None else "leave it out"
            advice = instead.get(field, advice)
            raise PydanticCustomError("field", "is not served; {advice}", {"field": field, "advice": advice})
    return {field: value for field, value in body.items() if field not in unserved}
