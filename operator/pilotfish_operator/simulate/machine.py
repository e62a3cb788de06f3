"""What a simulated engine runs on: a measured cost profile, its room, and how long it takes to start. Plain data."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pilotfish_engine.contract.speculation import CostProfile

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MachineError(Exception):
    """A machine's file says what cannot be; the sentence names the field."""


class Machine(BaseModel):
    """One replica. measured: where the figures are from. kv_tokens: room of its KV cache. chunk_size: prompt tokens of
    one pass. start_seconds: from a new pod to one that serves. told: the start-up profile where it differs from what
    steps really take. host_ms: between two steps. jitter: a step's relative standard deviation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    measured: str
    gpus: Annotated[int, Field(ge=0)] = 1
    max_running_requests: Positive
    kv_tokens: Positive
    chunk_size: Positive
    start_seconds: Seconds
    host_ms: Seconds = 0.0
    jitter: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    profile: CostProfile
    told: CostProfile | None = None


def read(text: str, name: str) -> Machine:
    """Returns the machine of a JSON file. Raises MachineError on what is not one, or on times that cannot be."""
    try:
        machine = Machine.model_validate_json(text)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise MachineError(f"{name}: {where}: {first['msg']}") from problem
    for which, profile in (("profile", machine.profile), ("told", machine.told)):
        if profile is not None and (why := impossible(profile)) is not None:
            raise MachineError(f"{name}: {which}.{why}")
    return machine


def impossible(profile: CostProfile) -> str | None:
    """Returns what cannot be true of a profile, by its field and the value; None where nothing is wrong."""
    if not profile.verify_ms:
        return "verify_ms is empty; it needs at least one (tokens, ms)"
    for field in ("verify_ms", "draft_ms", "extend_ms"):
        for size, ms in getattr(profile, field):
            if not ms > 0:
                return f"{field} has ({size}, {ms:g}); a time above 0 would work"
    return None
