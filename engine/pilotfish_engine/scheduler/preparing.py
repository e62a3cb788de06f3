"""Requests that cannot be admitted yet: their grammar is being compiled, apart from the steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

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
        self._members: set[Request] = set()
        self._compiled: SimpleQueue[Request] = SimpleQueue()  # filled by whichever thread compiles

    def __len__(self) -> int:
        return len(self._members)

    def add(self, request: Request) -> None:
        assert request.params.grammar is not None, "a request without a grammar is ready"
        if self._compiler is None:
            request.grammar = Future[CompiledGrammar]()
            error = RequestError("a grammar needs a tokenizer, and the checkpoint has none", "grammar")
            request.grammar.set_exception(error)
        else:
            request.grammar = self._compiler(request.params.grammar)
        self._members.add(request)
        request.grammar.add_done_callback(lambda _: self._compiled.put(request))

    def discard(self, request: Request) -> None:
        self._members.discard(request)

    def take(self, idle: bool) -> list[tuple[Request, BaseException | None]]:
        """Those that are ready, or why they never will be. `idle`: nothing else is to do, so it may wait a little."""
        taken: list[tuple[Request, BaseException | None]] = []
        while self._members or not self._compiled.empty():  # those whose requests have gone are let go too
            try:
                request = self._compiled.get(idle and not taken, WAIT_SECONDS)
            except Empty:
                break
            if request in self._members and request.grammar is not None:
                self._members.discard(request)
                taken.append((request, request.grammar.exception()))
        return taken
