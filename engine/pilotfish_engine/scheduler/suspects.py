"""Requests one of which made a batch fail: they go on in halves, and alone in the end, so that the others go on too.

While there are any, only the first group's members run. A member has passed when it has ended or has gone two tokens
past where it stood, by a prompt pass and a decode step. Pure: no clock, no worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pilotfish_engine.scheduler.request import Request

PASSED = 2  # tokens


class Suspects:
    def __init__(self) -> None:
        self._groups: list[dict[Request, int]] = []  # each member with how many tokens it had

    def accuse(self, requests: Sequence[Request]) -> None:
        """They were in a batch that failed, of several requests."""
        self._drop(requests)
        half = (len(requests) + 1) // 2
        parts = (requests[:half], requests[half:])
        self._groups[:0] = [{request: len(request.token_ids) for request in part} for part in parts if part]

    def may_run(self, request: Request) -> bool:
        return not self._groups or request in self._groups[0]

    def let_pass(self) -> None:
        """Those who have shown that they are not at fault."""
        members = [member for group in self._groups for member in group.items()]
        self._drop([r for r, known in members if r.end is not None or len(r.token_ids) >= known + PASSED])

    def waiting(self) -> list[Request]:
        """Of the first group who has no row, in order."""
        group = self._groups[0] if self._groups else ()
        idle = (r for r in group if not r.running and r.end is None)
        return sorted(idle, key=lambda request: request.place)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def _drop(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        kept = ({r: known for r, known in group.items() if r not in gone} for group in self._groups)
        self._groups = [group for group in kept if group]
