"""The speculative methods by name. A new method is one file and one line here (or one `register` call from outside).

Torch-free until a method is loaded, so that the command line can name the methods before anything costs memory.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pilotfish_engine.errors import MethodError

if TYPE_CHECKING:
    from pilotfish_engine.speculation.proposer import ProposerFactory

NO_METHOD = "None"
AUTO = "Auto"


@dataclass(frozen=True)
class Method:
    """factory: "module:function" of a ProposerFactory. needs_draft: a draft checkpoint is required (else refused)."""

    name: str
    factory: str
    needs_draft: bool
    trees: bool

    def load(self) -> ProposerFactory:
        module, _, function = self.factory.partition(":")
        return cast("ProposerFactory", getattr(importlib.import_module(module), function))


_METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    if method.name in _METHODS or method.name in (NO_METHOD, AUTO):
        raise MethodError(f"method {method.name!r} is registered already; choose another name")
    _METHODS[method.name] = method


register(Method("NGRAM", "pilotfish_engine.speculation.ngram:build", needs_draft=False, trees=True))
register(Method("STANDALONE", "pilotfish_engine.speculation.standalone:build", needs_draft=True, trees=True))


def methods() -> tuple[Method, ...]:
    return tuple(_METHODS.values())


def names() -> tuple[str, ...]:
    """Every value of --method."""
    return (NO_METHOD, AUTO, *_METHODS)


def resolve(name: str, draft: str | None) -> Method | None:
    """The method that a configuration means; None for plain decoding. Raises MethodError naming what would work."""
    if name == NO_METHOD:
        if draft is not None:
            raise MethodError(f"method None takes no draft, but the draft is {draft!r}; leave it out or name a method")
        return None
    if name == AUTO:
        name = "NGRAM" if draft is None else "STANDALONE"
    method = _METHODS.get(name)
    if method is None:
        raise MethodError(f"method {name!r} is unknown; one of {', '.join(names())} would work")
    if method.needs_draft and draft is None:
        raise MethodError(f"method {name} needs a draft model, and none is given; add --draft")
    if not method.needs_draft and draft is not None:
        raise MethodError(f"method {name} takes no draft, but the draft is {draft!r}; leave it out")
    return method
