"""The demo passes on what was seen in the course of a load, whatever stands when it looks last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from examples.demo.record import Record, course

FIRST = {"numSteps": 4, "topK": 2, "numDraftTokens": 8, "disableThreshold": "Auto"}
OTHER = {"numSteps": 1, "topK": 1, "numDraftTokens": 2, "disableThreshold": 14}


def status(replicas: int, desired: dict[str, Any] | None = None, effective: dict[str, Any] | None = None) -> Any:
    found = {"desired": desired, "effective": effective and effective | {"podsInStep": "1/2"}}
    return {"readyReplicas": replicas, "speculation": {key: value for key, value in found.items() if value}}


def event(uid: str, reason: str) -> Any:
    return {"metadata": {"uid": uid}, "reason": reason, "message": f"{reason} of {uid}"}


def after(*seen: Any, events: Sequence[Any] = (), told: frozenset[str] = frozenset()) -> Record:
    record = Record(status(1, FIRST, FIRST), told)
    for each in seen:
        record.see(each)
    record.hear(events)
    return record


def test_settings_that_are_back_when_the_second_replica_comes_have_changed() -> None:
    assert after(status(1, OTHER, OTHER), status(1, FIRST, OTHER), status(2, FIRST, FIRST)).missing == ""


def test_a_replica_that_has_gone_again_has_served() -> None:
    assert after(status(2, FIRST, FIRST), status(1, OTHER, FIRST)).missing == ""


def test_what_changed_between_two_looks_stands_in_the_events() -> None:
    assert after(status(2, FIRST, FIRST), events=[event("b", "SpeculationChanged")]).missing == ""


def test_engines_that_move_within_what_they_may_have_changed() -> None:
    assert after(status(2, FIRST, OTHER)).missing == ""


@pytest.mark.parametrize(
    ("record", "missing"),
    [
        (after(), "a second replica that serves and changed settings"),
        (after(status(1, OTHER, FIRST)), "a second replica that serves"),
        (after(status(2, FIRST, FIRST)), "changed settings"),
        (after(status(2, FIRST), status(2, FIRST, FIRST)), "changed settings"),
        (after(status(2, FIRST, FIRST), events=[event("b", "Scaled")]), "changed settings"),
        (
            after(status(2, FIRST, FIRST), events=[event("a", "SpeculationChanged")], told=frozenset("a")),
            "changed settings",
        ),
        (after(status(0), status(1), events=[event("b", "SpeculationChanged")]), "a second replica that serves"),
    ],
)
def test_what_was_not_seen_is_missing(record: Record, missing: str) -> None:
    assert record.missing == missing


def test_the_course_of_the_settings() -> None:
    seen = after(status(1, OTHER), status(1, OTHER), status(2, FIRST, FIRST))
    assert course(seen.desired) == "4×2→8, then 1×1→2, then 4×2→8"
    plain = OTHER | {"numSteps": 0, "numDraftTokens": 1}
    assert course([FIRST, plain, plain | {"disableThreshold": 15}, OTHER]) == "4×2→8, then plain, then 1×1→2"
