"""Plain data between reading engines and reconciling: whom to read, and what was found. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pilotfish_engine.contract.speculation import EngineReport


@dataclass(frozen=True)
class Target:
    """A pod that serves. `restarts` of its container: an engine started anew is asked anew."""

    uid: str
    name: str
    address: str
    port: int
    restarts: int = 0


@dataclass(frozen=True)
class Drift:
    """Since when a pod holds other settings than it should, and what it said when it was told."""

    since: float
    why: str


@dataclass(frozen=True)
class Round:
    """One time round: whom it should have read, and what those said that are believed."""

    at: float
    serving: tuple[str, ...]
    reports: Mapping[str, EngineReport]


@dataclass(frozen=True)
class Seen:
    """By uid: the last believed reports, why others have none, why some are not believed, who drifts."""

    reports: Mapping[str, EngineReport] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    doubted: Mapping[str, str] = field(default_factory=dict)
    drift: Mapping[str, Drift] = field(default_factory=dict)
