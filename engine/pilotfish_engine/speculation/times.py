"""What an engine learns of time from the steps it runs: how far they are from the cost profile, and what the host adds.

Pure counting, without clock. Knows nothing about acceptance or about what is run next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from pilotfish_engine.contract.speculation import CostProfile, Settings

Key = TypeVar("Key")


class _Means(Generic[Key]):
    """Means of the last `memory` or so values, by key."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._counted: dict[Key, tuple[int, float]] = {}  # how many values, and their mean

    def __iter__(self) -> Iterator[Key]:
        return iter(self._counted)

    def add(self, key: Key, value: float) -> None:
        count, mean = self._counted.get(key, (0, 0.0))
        self._counted[key] = (count + 1, mean + (value - mean) / min(count + 1, self._memory))

    def get(self, key: Key, least: int = 1) -> float | None:
        """None: fewer than `least` values are known."""
        count, mean = self._counted.get(key, (0, 0.0))
        return mean if count >= least else None


class StepTimes:
    """How far measured steps are from the profile's, so that a wrong profile does not hold a losing choice.

    Only what speculative steps cost *beside plain ones* moves a decision between the two; a machine that is slow at
    both moves none. Kept by power-of-two batches, as means of the last _MEMORY or so steps.
    """

    _MEMORY = 16
    _NEEDED = 3  # of either kind, before a batch size is corrected
    _CLIP = 3.0  # a step that the machine interrupted says little

    def __init__(self) -> None:
        self._ratios = _Means[tuple[int, bool]](self._MEMORY)  # by batch bucket, and whether it drafted

    def observe(self, settings: Settings, batch: int, measured_to_predicted: float) -> None:
        """A step of `batch` requests took so many times what the profile says."""
        ratio = min(max(measured_to_predicted, 1 / self._CLIP), self._CLIP)
        self._ratios.add((batch.bit_length(), settings.num_steps > 0), ratio)

    def spec_to_plain(self, batch: int) -> float:
        """By how much the profile underrates speculative steps against plain ones; 1 where it is not known."""
        spec, plain = (self._ratios.get((batch.bit_length(), drafted), self._NEEDED) for drafted in (True, False))
        return 1.0 if spec is None or plain is None else spec / plain


class HostTimes:
    """The profile with what the host does between steps: the same for any settings, it favours those that commit more
    tokens a step. Kept by power-of-two batches, as means of the last _MEMORY or so steps; a batch of which nothing is
    known has that of the next smaller one."""

    _MEMORY = 32
    _STEP = 1.1  # a profile is made anew only where the time has changed by so much

    def __init__(self, profile: CostProfile) -> None:
        self._measured = profile
        self._known = _Means[int](self._MEMORY)  # ms by batch bucket
        self._profiles: dict[int, tuple[float, CostProfile]] = {}  # batch bucket: the time in it, and the profile

    def observe(self, batch: int, host_ms: float) -> None:
        """So long was the pause before a step of `batch` requests."""
        self._known.add(batch.bit_length(), host_ms)

    def profile(self, batch: int) -> CostProfile:
        """For steps of `batch` requests."""
        bucket = max((known for known in self._known if known <= batch.bit_length()), default=None)
        now = None if bucket is None else self._known.get(bucket)
        if bucket is None or now is None:
            return self._measured
        used, profile = self._profiles.get(bucket, (0.0, self._measured))
        if not used / self._STEP <= now <= used * self._STEP:
            added = {name: getattr(self._measured, name) + now for name in ("overhead_ms", "plain_overhead_ms")}
            profile = self._measured.model_copy(update=added)
            self._profiles[bucket] = (now, profile)
        return profile
