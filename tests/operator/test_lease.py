"""Leader election: the pure move, and that two never lead at once on one clock."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish_operator.kube import TIMEOUT
from pilotfish_operator.lease import DURATION, RENEW_DEADLINE, Sighting, next_move


def lease(holder: str, version: str = "1") -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": version},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": DURATION},
    }


OLD = Sighting("1", 0.0)


@pytest.mark.parametrize(
    ("found", "seen", "now", "move"),
    [
        (None, None, 0, "create"),
        (lease("me"), OLD, 5, "renew"),
        (lease(""), None, 5, "take"),
        (lease("other"), None, 100, "wait"),  # first sight: its age is not known, whatever its clock says
        (lease("other"), OLD, DURATION - 0.1, "wait"),
        (lease("other"), OLD, DURATION, "take"),
        (lease("other", "2"), OLD, DURATION, "wait"),  # it was renewed meanwhile
    ],
)
def test_the_next_move(found: dict[str, Any] | None, seen: Sighting | None, now: float, move: str) -> None:
    assert next_move(found, seen, "me", now)[0] == move


def test_a_write_begun_as_leader_ends_before_anybody_else_may_lead() -> None:
    assert RENEW_DEADLINE + TIMEOUT < DURATION
