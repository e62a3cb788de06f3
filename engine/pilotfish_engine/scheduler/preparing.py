"""Requests that cannot be admitted yet: their grammar is being compiled, apart from the steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import Grammar
from pilotfish_engine.scheduler.request import Request
from pilotfish_engine.types import CompiledGrammar

# Returns at once; the future raises RequestError when the grammar cannot be used.
GrammarCompiler = Callable[[Grammar], Future[CompiledGrammar]]
WAIT_SECONDS = 0.005


class Preparing:
    """compiler: None where the checkpoint has no tokenizer."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        assert request.params.grammar is not None, "a request without a grammar is ready"
        if self._compiler is None:
            request.grammar = Future[CompiledGrammar]()
            error = RequestError("a grammar needs a tokenizer, and the checkpoint has none", "grammar")
            request.grammar.set_exception(error)
        else:
            request.grammar = self._compiler(request.params.grammar)
        self.requests.append(request)

    def take(self, idle: bool) -> list[tuple[Request, BaseException | None]]:
        """Those that are ready, in order, or why they never will be. `idle`: nothing else is to do, so it may wait a
        little."""
        grammars = [request.grammar for request in self.requests if request.grammar is not None]
        if idle and grammars:
            wait(grammars, WAIT_SECONDS)
        done = [(request, grammar) for request, grammar in zip(self.requests, grammars, strict=True) if grammar.done()]
        for request, _ in done:
            self.requests.remove(request)
        return [(request, grammar.exception()) for request, grammar in done]
