"""The speculative methods by name. A new method is one file and one line here (or one `register` call from outside).

Torch-free until a method is loaded, so that the command line can name the methods before anything costs memory.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pilotfish_engine.errors import MethodError

if TYPE_CHECKING:
    from pilotfish_engine.speculation.proposer import MethodModule, Models

NO_METHOD = "None"
AUTO = "Auto"


@dataclass(frozen=True)
class Method:
    """module: where the functions of MethodModule stand. needs_draft, takes_draft: a draft checkpoint is required,
    allowed. trees: topk above 1 works. takes_corpus: so does a file of texts. Auto asks the methods by `preference`,
    largest first, which of them the checkpoints fit; 0 is never asked."""

    name: str
    module: str
    needs_draft: bool
    trees: bool
    preference: int = 0
    takes_draft: bool = False
    takes_corpus: bool = False

    def load(self) -> MethodModule:
        return cast("MethodModule", importlib.import_module(self.module))


_METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    if method.name in _METHODS or method.name in (NO_METHOD, AUTO):
        raise MethodError(f"method {method.name!r} is registered already; choose another name")
    _METHODS[method.name] = method


register(Method("NGRAM", "pilotfish_engine.speculation.ngram", False, trees=True, preference=1, takes_corpus=True))
register(Method("STANDALONE", "pilotfish_engine.speculation.standalone", needs_draft=True, trees=True, preference=1))
register(Method("EAGLE", "pilotfish_engine.speculation.eagle", needs_draft=True, trees=True, preference=3))
register(Method("EAGLE3", "pilotfish_engine.speculation.eagle3", needs_draft=True, trees=True, preference=3))
register(Method("MTP", "pilotfish_engine.speculation.mtp", False, trees=True, preference=2, takes_draft=True))
register(Method("DFLASH", "pilotfish_engine.speculation.dflash", needs_draft=True, trees=True, preference=4))


def methods() -> tuple[Method, ...]:
    return tuple(_METHODS.values())


def names() -> tuple[str, ...]:
    """Every value of --method."""
    return (NO_METHOD, AUTO, *_METHODS)


def check(name: str, draft: str | None, corpus: str | None = None) -> None:
    """Raises MethodError where name and presence of a draft or a corpus contradict, naming what would work."""
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
    if draft is not None and not (method.needs_draft or method.takes_draft):
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
        usable = method.needs_draft or method.takes_draft if has_draft else not method.needs_draft
        usable = usable and (method.takes_corpus or models.corpus is None)
        if usable and method.preference > 0 and method.load().recognises(models):
            return method
    beside = "" if models.corpus is None else f", with the corpus {models.corpus} beside it,"
    raise MethodError(
        f"the draft {models.draft}{beside} is none that a method knows; one of {', '.join(names())} would work"
    )
