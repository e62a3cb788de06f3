"""What a load has shown so far: the statuses seen in its course and the events that the operator wrote.

The moment at which the demo looks decides nothing: what came and went has been. Knows nothing about kubectl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]
KEYS = ("numSteps", "topK", "numDraftTokens", "disableThreshold")
CHANGED = "SpeculationChanged"  # the operator's event


@dataclass
class Record:
    """first: the status before the load. told: events that were there before it, by uid."""

    first: Mapping[str, Any]
    told: frozenset[str] = frozenset()
    most_replicas: int = 0
    desired: list[Settings] = field(default_factory=list)
    effective: list[Settings] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.see(self.first)

    def see(self, status: Mapping[str, Any]) -> None:
        """Take in a status; what differs from the last one is kept."""
        self.most_replicas = max(self.most_replicas, status.get("readyReplicas", 0))
        for seen, kind in ((self.desired, "desired"), (self.effective, "effective")):
            settings = part(status, kind)
            if settings and (not seen or seen[-1] != settings):
                seen.append(settings)

    def hear(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take in the model's events, all that there are."""
        new = [event for event in events if event["metadata"]["uid"] not in self.told]
        self.events = [event["message"] for event in new if event["reason"] == CHANGED]

    @property
    def scaled(self) -> bool:
        return self.most_replicas > int(self.first.get("readyReplicas", 0))

    @property
    def retuned(self) -> bool:
        """Whether the operator set other settings, or engines moved within theirs, since the load began."""
        return len(self.desired) > 1 or len(self.effective) > 1 or bool(self.events)

    @property
    def missing(self) -> str:
        """What the load has not shown yet; empty when it has shown all."""
        wanted = [(self.scaled, "a second replica that serves"), (self.retuned, "changed settings")]
        return " and ".join(what for seen, what in wanted if not seen)


def part(status: Mapping[str, Any], kind: str) -> Settings:
    """The settings of this kind, `desired` or `effective`, and nothing beside them."""
    found = status.get("speculation", {}).get(kind, {})
    return {key: found[key] for key in KEYS if key in found}


def words(settings: Settings) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "not known yet"


def course(seen: Sequence[Settings]) -> str:
    """The settings in the order in which they were seen, in short."""
    steps = [short(settings) for settings in seen]
    return ", then ".join(step for step, before in zip(steps, [None, *steps], strict=False) if step != before)


def short(settings: Settings) -> str:
    """Steps × top-k → tokens; plain for no steps."""
    if settings.get("numSteps") == 0:
        return "plain"
    return f"{settings.get('numSteps', '?')}×{settings.get('topK', '?')}→{settings.get('numDraftTokens', '?')}"
