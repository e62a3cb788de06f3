"""Foresees which steps a server will run, by its cost profile and its envelope: what is recorded before it serves."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish_engine.contract.goodput import Acceptance, best
from pilotfish_engine.contract.speculation import MAX_NUM_STEPS, PLAIN, CostProfile, Envelope, Settings

USUAL = 0.6  # the share of drafts that is accepted, of those that nothing was rejected before
OTHERS = (0.8, 0.4, 0.9)
CONTEXT = 1024  # tokens a request
MARGIN = 0.01


def worthwhile(profile: CostProfile, envelope: Envelope, batches: Sequence[int]) -> list[tuple[int, Settings]]:
    """Batch sizes and settings, the surest first, each once: plain, then what wins at usual and at other acceptance."""
    found: dict[tuple[int, Settings], None] = {}
    if not (envelope.tuning == "Fixed" and envelope.num_steps > 0 and envelope.disable_threshold == "Auto"):
        found |= {(batch, PLAIN): None for batch in batches}
    if envelope.num_steps > 0:
        for share in (USUAL, *OTHERS):
            acceptance = Acceptance(tuple(share**depth for depth in range(1, MAX_NUM_STEPS + 1)))
            for batch in batches:
                found[batch, best(profile, acceptance, batch, batch * CONTEXT, envelope, MARGIN).settings] = None
    return list(found)
