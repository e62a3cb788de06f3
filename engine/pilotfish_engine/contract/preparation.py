"""Decides when to run settings whose steps must be prepared, such as recorded as graphs.

Pure counting, without tensors or clock. They wait until running the best of those that are ready has cost as much as
preparing them will. Where none is ready the best is prepared at once. What a server will surely run is prepared before
it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pilotfish_engine.contract.goodput import Acceptance, best
from pilotfish_engine.contract.speculation import MAX_NUM_STEPS, PLAIN, CostProfile, Envelope, Settings

_USUAL = 0.6  # the share of drafts that is accepted, of those that nothing was rejected before
_OTHERS = (0.8, 0.4, 0.9)
_CONTEXT = 1024  # tokens a request
_MARGIN = 0.01
# Returns the milliseconds that steps of settings take once, beside their own time; 0 where they are ready.
Preparing = Callable[[Settings], float]
Rate = Callable[[Settings], float]


def ready(settings: Settings) -> float:
    """Returns 0: nothing has to be prepared."""
    return 0.0


class Preparation:
    """One per engine. hysteresis: by how much a ready setting must be better to replace the one that runs."""

    def __init__(self, hysteresis: float) -> None:
        self._hysteresis = hysteresis
        self._missed_ms = 0.0  # by waiting with what was not ready, since something was prepared

    def settle(
        self,
        wanted: Settings,
        runs: Settings,
        options: Sequence[Settings],
        rate: Rate,
        preparing: Preparing,
        ran_ms: float,
    ) -> Settings:
        """Returns `wanted`, or while it is not ready the best of the options that is.

        rate: tokens/s of settings. ran_ms: for how long `runs` has run since the last call.
        """
        price = preparing(wanted)
        if price == 0:
            return wanted
        usable = [settings for settings in options if preparing(settings) == 0]
        if not usable:
            return wanted
        rates = {settings: rate(settings) for settings in (wanted, *usable)}
        instead = max(usable, key=lambda settings: rates[settings])
        if runs in usable and rates[instead] < rates[runs] * (1 + self._hysteresis):
            instead = runs
        self._missed_ms += ran_ms * max(0.0, 1 - rates[instead] / rates[wanted])
        if self._missed_ms < price:
            return instead
        self._missed_ms = 0.0
        return wanted


def worthwhile(profile: CostProfile, envelope: Envelope, batches: Sequence[int]) -> list[tuple[int, Settings]]:
    """Batch sizes and settings, the surest first, each once: plain, then what wins at usual and at other acceptance."""
    found: dict[tuple[int, Settings], None] = {}
    if not (envelope.tuning == "Fixed" and envelope.num_steps > 0 and envelope.disable_threshold == "Auto"):
        found |= {(batch, PLAIN): None for batch in batches}
    if envelope.num_steps > 0:
        for share in (_USUAL, *_OTHERS):
            acceptance = Acceptance(tuple(share**depth for depth in range(1, MAX_NUM_STEPS + 1)))
            for batch in batches:
                found[batch, best(profile, acceptance, batch, batch * _CONTEXT, envelope, _MARGIN).settings] = None
    return list(found)
