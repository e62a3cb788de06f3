"""Corrects a cost profile by the times of the steps that an engine runs.

Pure counting, without a clock. Knows nothing about acceptance or about what is run next.
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish_engine.contract.goodput import Costs, costs
from pilotfish_engine.contract.speculation import Correction, CostProfile, Place, Settings

_FOLLOWS = 8  # steps over which what runs is followed,
_KEEPS = 32  # and after which it is known as well as ever
_SHARED = 0.75  # of what a step missed is everybody's, however long ago its settings ran: were it less then, what the
_SETTLES = 32  # first steps of a load differ by would drift, once a setting has run for so many steps
_HOST_MEMORY = 32
_CLIP = 3.0  # a first step this far from the profile says little more than that,
_SURPRISE = 0.5  # and a later one that the machine interrupted no more than this share
_SURE = 0.005  # a measured time may be off by this share,
_UNSURE = 0.1  # and one that was never measured by this much more
_FORGETS = 0.98  # of a setting's count, with each step of another one: a GPU's clock follows the load


class MeasuredCosts(Costs):
    """The profile's times as real steps correct them: `step_ms` of the `goodput.Costs` that decisions are made by.

    At each power-of-two batch a step takes (1 + common + own) times what the profile says, and then what the host adds.
    `common` is followed quickly by whatever runs, since contexts grow and machines slow down for all settings alike;
    `own` is one setting's difference from it and changes slowly. Settings that never ran have the `own` of those that
    did, linearly between the two nearest by the profile's time. A batch of which nothing is known has the corrections
    of the next smaller known one, else of the next larger.
    """

    def __init__(self, profile: CostProfile, places: Sequence[Place] = ()) -> None:
        """places: what another engine of the same profile has learnt. Raises ValueError on an unusable profile."""
        self._profile = costs(profile)
        self._places = {place.bits: _Place.read(place) for place in places}  # by the batch's bit length

    def observe(self, settings: Settings, batch: int, context_tokens: int, step_ms: float) -> None:
        """Counts one step of `batch` requests that took step_ms, without the host's part."""
        self._own(batch).observe(settings, self._profile.step_ms(settings, batch, context_tokens), step_ms)

    def observe_host(self, batch: int, host_ms: float) -> None:
        """Counts one pause of the device before a step of `batch` requests."""
        self._own(batch).observe_host(host_ms)

    def step_ms(self, settings: Settings, batch: int, context_tokens: int) -> float:
        expected = self._profile.step_ms(settings, batch, context_tokens)
        place = self._nearest(batch)
        return expected if place is None else expected * place.factor(settings, expected) + place.host_ms

    def least_ms(self, settings: Settings, batch: int, context_tokens: int) -> float:
        """Returns the least that `step_ms` may turn out to be. That depends on how often the settings ran lately at
        this batch.

        Of what never ran here even the profile's own time may be true.
        """
        place, ms = self._nearest(batch), self.step_ms(settings, batch, context_tokens)
        if place is None:
            return ms * (1 - _UNSURE)
        count = place.count(settings) if batch.bit_length() in self._places else 0.0
        if count < 1:
            ms = min(ms, self._profile.step_ms(settings, batch, context_tokens) + place.host_ms)
        return ms * (1 - _SURE - _UNSURE / (count + 1))

    def places(self) -> tuple[Place, ...]:
        """Returns what was learnt, for another engine of the same profile."""
        return tuple(place.written(bits) for bits, place in sorted(self._places.items()))

    def _own(self, batch: int) -> _Place:
        """The place of this batch, which begins as the nearest one stands."""
        bucket = batch.bit_length()
        if bucket not in self._places:
            self._places[bucket] = _Place(self._nearest(batch))
        return self._places[bucket]

    def _nearest(self, batch: int) -> _Place | None:
        bucket = batch.bit_length()
        if bucket in self._places or not self._places:
            return self._places.get(bucket)
        below = [known for known in self._places if known < bucket]
        return self._places[max(below) if below else min(self._places)]


class _Own:
    """One setting's difference from `common`, and the profile's time of its last step."""

    def __init__(self, expected_ms: float, difference: float, count: float, seen: int = 0) -> None:
        self.expected_ms = expected_ms
        self.difference = difference
        self.count = count
        self.seen = seen


class _Place:
    """What is known of one batch size. `like`: another one, whose corrections are the first guess."""

    def __init__(self, like: _Place | None) -> None:
        self.host_ms = 0.0
        self._pauses = 0
        self._common = 0.0
        self._steps = 0
        self._own: dict[Settings, _Own] = {}
        if like is not None:
            self.host_ms, self._common = like.host_ms, like._common
            self._own = {
                s: _Own(own.expected_ms, own.difference, min(own.count, 1.0), own.seen) for s, own in like._own.items()
            }

    @classmethod
    def read(cls, place: Place) -> _Place:
        """What another engine wrote: believed as a whole, and each setting as if it had run a few times."""
        found = cls(None)
        found.host_ms, found._common, found._steps = place.host_ms, place.common, min(place.steps, _FOLLOWS)
        found._pauses = min(place.steps, _FOLLOWS)
        for one in place.settings:
            found._own[one.settings] = _Own(one.expected_ms, one.difference, min(one.count, _FOLLOWS), _SETTLES)
        return found

    def written(self, bits: int) -> Place:
        settings = tuple(
            Correction(settings=s, expected_ms=own.expected_ms, difference=_clip(own.difference), count=own.count)
            for s, own in self._own.items()
        )
        return Place(bits=bits, common=_clip(self._common), host_ms=self.host_ms, steps=self._steps, settings=settings)

    def observe(self, settings: Settings, expected_ms: float, step_ms: float) -> None:
        ratio = min(max(step_ms / expected_ms, 1 / _CLIP), _CLIP)
        factor = self.factor(settings, expected_ms)
        if self._steps:
            ratio = min(max(ratio, factor * (1 - _SURPRISE)), factor * (1 + _SURPRISE))
        own = self._own.get(settings)
        if own is None:
            difference = 0.0 if not self._own else factor - 1 - self._common
            own = self._own[settings] = _Own(expected_ms, difference, 0.0)
        missed = (ratio - factor) * (max(1 / (own.count + 1), 1 / _FOLLOWS) if self._steps else 1.0)
        # the first setting's error is everybody's, and a further one's its own until it has run for a while
        is_first = not self._steps or len(self._own) == 1
        shared = 1.0 if is_first else _SHARED * min(own.seen / _SETTLES, 1.0)
        self._common += missed * shared
        own.difference += missed * (1 - shared)
        own.seen = min(own.seen + 1, _SETTLES)
        self._steps += 1
        for other in self._own.values():
            other.count *= _FORGETS
        own.count, own.expected_ms = min(own.count + 1, _KEEPS), expected_ms

    def observe_host(self, host_ms: float) -> None:
        self._pauses += 1
        self.host_ms += (host_ms - self.host_ms) / min(self._pauses, _HOST_MEMORY)

    def count(self, settings: Settings) -> float:
        own = self._own.get(settings)
        return 0.0 if own is None else own.count

    def factor(self, settings: Settings, expected_ms: float) -> float:
        own = self._own.get(settings)
        # corrections that were learnt of other settings may add up to less than nothing
        return max(1 / _CLIP, 1 + self._common + (self._between(expected_ms) if own is None else own.difference))

    def _between(self, expected_ms: float) -> float:
        """The difference of settings that never ran, by those that did."""
        known = sorted((own.expected_ms, own.difference) for own in self._own.values())
        return _linear(known, expected_ms)


def _clip(difference: float) -> float:
    return min(max(difference, -1.0), _CLIP)


def _linear(points: Sequence[tuple[float, float]], x: float) -> float:
    """Of (x, y) points in order: between two of them linear, beyond the ends as at the end, 0 without any."""
    right = next((i for i, (at, _) in enumerate(points) if at >= x), len(points))
    if right == len(points) or right == 0:
        return points[min(right, len(points) - 1)][1] if points else 0.0
    (low, below), (high, above) = points[right - 1], points[right]
    return below + (above - below) * (x - low) / (high - low)
