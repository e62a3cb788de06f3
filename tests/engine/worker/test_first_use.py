"""What a trial pass at the start makes first is written by requests all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish_engine.messages import SamplingParams
from pilotfish_engine.types import Admission
from tests.engine.conformance import harness, models
from tests.engine.conformance.harness import Harness

PENALISED = {"repetition_penalty": 1.1, "presence_penalty": 0.1}


@pytest.mark.parametrize("trial", [PENALISED, {"logit_bias": [(3, 1.0)]}, {"logprobs": 1}])
def test_a_request_goes_through_after_a_trial_of_what_it_asks_for(trial: dict[str, Any], tmp_path: Path) -> None:
    models.target_model().save_pretrained(tmp_path)
    parts = harness.load(tmp_path, "None", None, 16, 0, 1)
    with torch.inference_mode():  # as `measure_needs` does on a GPU
        parts.step.state.admit(Admission(0, [0], 0, [], SamplingParams(max_tokens=1, **trial), 0))
        parts.step.state.release(0)
    asked = Harness(parts)
    number = asked.submit([5, 6, 7], max_tokens=4, ignore_eos=True, **trial)
    asked.drain()
    assert len(asked.answers[number].token_ids) == 4
