"""Finds the modules of the contract's methods, and which method a configuration means.

A new method is one row of the table and one file here: its name in lower case (or one `register` call from outside).
Torch-free until a method is loaded, so that the command line can name the methods before anything costs memory.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from pilotfish_engine.contract.methods import AUTO, METHODS, NO_METHOD, Limit, Limits, Method
from pilotfish_engine.errors import MethodError

if TYPE_CHECKING:
    from pilotfish_engine.speculation.proposer import MethodModule, Models

_METHODS: dict[str, Method] = {}
_MODULES: dict[str, str] = {}


def register(method: Method, module: str) -> None:
    """module: where the functions of MethodModule stand."""
    if method.name in _METHODS or method.name in (NO_METHOD, AUTO):
        raise MethodError(f"method {method.name!r} is registered already; choose another name")
    _METHODS[method.name] = method
    _MODULES[method.name] = module


for _row in METHODS:
    register(_row, f"pilotfish_engine.speculation.{_row.name.lower()}")


def methods() -> tuple[Method, ...]:
    return tuple(_METHODS.values())


def load(method: Method) -> MethodModule:
    """Import the module that implements a method."""
    return cast("MethodModule", importlib.import_module(_MODULES[method.name]))


def judge(method: Method, models: Models) -> Limits:
    """What drafts of these checkpoints can do, from metadata. Raises MethodError or CheckpointError for a misfit."""
    limits = load(method).check(models)
    return limits if method.trees else replace(limits, topk=Limit(1, f"{method.name} drafts chains"))


def names() -> tuple[str, ...]:
    """Every value of --method."""
    return (NO_METHOD, AUTO, *_METHODS)


def check(name: str, draft: str | None, corpus: str | None = None) -> None:
    """Raises MethodError where the name contradicts the presence of a draft or a corpus. It names what would work."""
    if name == NO_METHOD and draft is not None:
        raise MethodError(f"method None takes no draft, but the draft is {draft!r}; leave it out or name a method")
    takers = [method.name for method in _METHODS.values() if method.takes_corpus]
    if corpus is not None and name in (NO_METHOD, *_METHODS) and name not in takers:
        raise MethodError(
            f"method {name} takes no corpus, but the corpus is {corpus!r}; leave it out or name {', '.join(takers)}"
        )
    if name in (NO_METHOD, AUTO):
        return
    method = _METHODS.get(name)
    if method is None:
        raise MethodError(f"method {name!r} is unknown; one of {', '.join(names())} would work")
    if method.needs_draft and draft is None:
        raise MethodError(f"method {name} needs a draft model, and none is given; add --draft")
    if draft is not None and not method.takes_draft:
        raise MethodError(f"method {name} takes no draft, but the draft is {draft!r}; leave it out")


def resolve(name: str, models: Models) -> Method | None:
    """The method that a configuration means, None for plain decoding; Auto: the first that says the checkpoints are
    its own. Reads metadata only. Raises MethodError."""
    if name == NO_METHOD:
        return None
    if name != AUTO:
        return _METHODS[name]
    has_draft = models.draft is not None
    for method in sorted(_METHODS.values(), key=lambda method: -method.preference):
        usable = method.takes_draft if has_draft else not method.needs_draft
        usable = usable and (method.takes_corpus or models.corpus is None)
        if usable and method.preference > 0 and load(method).recognises(models):
            return method
    beside = "" if models.corpus is None else f", with the corpus {models.corpus} beside it,"
    raise MethodError(
        f"the draft {models.draft}{beside} is none that a method knows; one of {', '.join(names())} would work"
    )
