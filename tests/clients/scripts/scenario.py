"""Runs a client's scenarios one after the other: `python with_NAME.py URL MODEL TOKENIZER [--announce]`.

Runs in the client's own environment, so it imports nothing but the standard library. Each scenario prints a line of
JSON when it ends. URL ends in /v1; TOKENIZER is a folder with the model's tokenizer; --announce tells a stub which
scenario the next requests belong to.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

URL, MODEL, TOKENIZER = sys.argv[1:4]
ROOT = URL.removesuffix("/v1")
# More than a context of 2048 tokens.
TOO_LONG = "a b " * 1500

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

_scenarios: list[Callable[[], Any]] = []


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    """Adds a scenario, plain or async: it passes when it raises nothing."""
    _scenarios.append(function)
    return function


class Raises:
    """`with Raises(Error) as caught:` demands the error, and keeps it as `caught.error`."""

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind
        self.error: Any = None

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        assert error is not None, f"no {self._kind.__name__}"
        self.error = error
        return isinstance(error, self._kind)


def main() -> None:
    for function in _scenarios:
        name = function.__name__
        if "--announce" in sys.argv:
            urllib.request.urlopen(f"{ROOT}/scenario/{urllib.parse.quote(name)}").close()
        error = None
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(function())
            else:
                function()
        except Exception as caught:
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"[:600]
        print(json.dumps({"scenario": name, "error": error}), flush=True)
