"""What an engine learns of time from the steps it runs: how far they are from the cost profile, and what the host adds.

Pure counting, without clock. Knows nothing about acceptance or about what is run next.
"""

from __future__ import annotations

from pilotfish_engine.contract.speculation import CostProfile, Settings


class StepTimes:
    """How far measured steps are from the profile's, so that a wrong profile does not hold a losing choice.

    Only what speculative steps cost *beside plain ones* moves a decision between the two; a machine that is slow at
    both moves none. Kept by power-of-two batches, as means of the last _MEMORY or so steps.
    """

    _MEMORY = 16
    _NEEDED = 3  # of either kind, before a batch size is corrected
    _CLIP = 3.0  # a step that the machine interrupted says little

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, bool], tuple[int, float]] = {}  # (batch bucket, speculative): steps, mean

    def observe(self, settings: Settings, batch: int, measured_to_predicted: float) -> None:
        """A step of `batch` requests took so many times what the profile says."""
        key = (batch.bit_length(), settings.num_steps > 0)
        steps, mean = self._ratios.get(key, (0, 1.0))
        ratio = min(max(measured_to_predicted, 1 / self._CLIP), self._CLIP)
        self._ratios[key] = (steps + 1, mean + (ratio - mean) / min(steps + 1, self._MEMORY))

    def spec_to_plain(self, batch: int) -> float:
        """By how much the profile underrates speculative steps against plain ones; 1 where it is not known."""
        spec_steps, spec = self._ratios.get((batch.bit_length(), True), (0, 1.0))
        plain_steps, plain = self._ratios.get((batch.bit_length(), False), (0, 1.0))
        return spec / plain if min(spec_steps, plain_steps) >= self._NEEDED else 1.0


class HostTimes:
    """The profile with what the host does between steps: the same for any settings, it favours those that commit more
    tokens a step. Kept by power-of-two batches, as means of the last _MEMORY or so steps; a batch of which nothing is
    known has that of the next smaller one."""

    _MEMORY = 32
    _STEP = 1.1  # a profile is made anew only where the time has changed by so much

    def __init__(self, profile: CostProfile) -> None:
        self._measured = profile
        self._known: dict[int, tuple[int, float]] = {}  # batch bucket: steps, mean in ms
        self._profiles: dict[int, tuple[float, CostProfile]] = {}  # batch bucket: the time in it, and the profile

    def observe(self, batch: int, host_ms: float) -> None:
        """So long was the pause before a step of `batch` requests."""
        steps, mean = self._known.get(batch.bit_length(), (0, 0.0))
        self._known[batch.bit_length()] = (steps + 1, mean + (host_ms - mean) / min(steps + 1, self._MEMORY))

    def profile(self, batch: int) -> CostProfile:
        """For steps of `batch` requests."""
        bucket = max((known for known in self._known if known <= batch.bit_length()), default=None)
        if bucket is None:
            return self._measured
        now = self._known[bucket][1]
        used, profile = self._profiles.get(bucket, (0.0, self._measured))
        if not used / self._STEP <= now <= used * self._STEP:
            added = {name: getattr(self._measured, name) + now for name in ("overhead_ms", "plain_overhead_ms")}
            profile = self._measured.model_copy(update=added)
            self._profiles[bucket] = (now, profile)
        return profile
