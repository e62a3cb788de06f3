"""The sentences: each form as it is read, and none too long at the largest numbers that there are."""

from __future__ import annotations

import pytest

from pilotfish_engine.contract import reason
from pilotfish_engine.contract.speculation import PLAIN, Envelope, Settings

K1 = Settings(num_steps=1, topk=1, num_draft_tokens=2)
K2 = Settings(num_steps=2, topk=1, num_draft_tokens=3)
TREE = Settings(num_steps=2, topk=2, num_draft_tokens=5)
BOUNDS = Envelope(num_steps=2, topk=2, num_draft_tokens=5)
FORMS = {
    "Chose 2 steps, top-1, 3 tokens: 303 tok/s at 6 running (1.22 × plain). Next best: 1 step, 294. "
    "Bounds: 2/2/5, threshold Auto.": reason.chose((K2, 303.2), 6, 248.4, (K1, 294.0), BOUNDS),
    "Chose plain decoding: 541 tok/s at 16 running. Next best: 2 steps, top-2, 5 tokens, 519. "
    "Bounds: 2/2/5, threshold Auto.": reason.chose((PLAIN, 541.0), 16, 541.0, (TREE, 519.4), BOUNDS),
    "Chose 1 step, top-1, 2 tokens: 60 tok/s at 1 running (1.20 × plain). Next best: plain, 50. "
    "Bounds: 2/2/5, threshold Auto.": reason.chose((K1, 60.0), 1, 50.0, (PLAIN, 50.0), BOUNDS),
    "Chose plain decoding: 50 tok/s at 1 running. Bounds: 2/2/5, threshold Auto.": reason.chose(
        (PLAIN, 50.0), 1, 50.0, None, BOUNDS
    ),
    "Fixed at 2 steps, top-2, 5 tokens: 45 tok/s at 1 running (0.90 × plain). "
    "Bounds: 2/2/5, threshold 8.": reason.fixed(
        (TREE, 45.0), 1, 50.0, BOUNDS.model_copy(update={"disable_threshold": 8})
    ),
    "Plain decoding from 8 running on: 400 tok/s at 9 running. Bounds: 2/2/5, threshold 8.": reason.disabled(
        400.0, 9, BOUNDS.model_copy(update={"disable_threshold": 8})
    ),
    "Keeps 1 step, top-1, 2 tokens: 300 tok/s at 6 running (1.20 × plain). Best: 2 steps, 302. "
    "Bounds: 2/2/5, threshold Auto.": reason.kept((K1, 300.0), 6, 250.0, (K2, 302.0), BOUNDS),
    "Bounds stay 2/2/5, threshold Auto: no engine has answered yet.": reason.bounds_kept(
        BOUNDS, "no engine has answered yet"
    ),
    "Bounds 2/2/5, threshold Auto → 1/1/2, threshold Auto: 268 tok/s at 6 running, before 233.": reason.bounds_changed(
        BOUNDS, Envelope(num_steps=1, topk=1, num_draft_tokens=2), 6, 233.0, 268.0
    ),
    "2 replicas for 31.0 requests at once over 60 s, 16 each.": reason.replicas(2, 31.0, 60, 16.0, False),
    "1 replica for 9.5 requests at once over 6 s (a burst), 4.5 each.": reason.replicas(1, 9.5, 6, 4.5, True),
    "Chose plain decoding: 525 tok/s at 16 running. Newer: 1 of 2 engines speculate now.": reason.overtaken(
        "Chose plain decoding: 525 tok/s at 16 running. Next best: 1 step, 509. Bounds: 1/1/2, threshold Auto.",
        1, 2, plain=False,
    ),
    "1 replica stays: what one carries is not known yet.": reason.replicas_kept(
        1, "what one carries is not known yet"
    ),
}


@pytest.mark.parametrize("expected", FORMS)
def test_each_form_as_it_is_read(expected: str) -> None:
    assert FORMS[expected] == expected


def test_no_form_is_too_long_at_the_largest_numbers() -> None:
    widest = Settings(num_steps=8, topk=8, num_draft_tokens=64)
    bounds = Envelope(num_steps=8, topk=8, num_draft_tokens=64, disable_threshold=4096)
    rated = (widest, 999_999.0)
    texts = [
        reason.chose(rated, 4096, 99_999.0, rated, bounds),
        reason.kept(rated, 4096, 99_999.0, rated, bounds),
        reason.fixed(rated, 4096, 99_999.0, bounds),
        reason.disabled(999_999.0, 4096, bounds),
        reason.bounds_kept(bounds, f"{4096} speculative steps are needed to judge them, and 4095 are measured"),
        reason.bounds_changed(bounds, bounds, 4096, 999_999.0, 999_999.0),
        reason.threshold_changed(bounds, bounds, 4096),
        reason.replicas(10_000, 99_999_999.9, 3600, 4096.0, True),
        reason.overtaken(reason.chose(rated, 4096, 99_999.0, rated, bounds), 10_000, 10_000, True),
    ]
    assert [text for text in texts if len(text) > reason.LONGEST] == []
