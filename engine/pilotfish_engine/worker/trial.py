"""Runs the largest passes of serving once, and sees what device memory they take; and what recorded steps take. On a
GPU, over the scratch page alone, before the KV cache has its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotfish_engine.batch.passes import over_spans
from pilotfish_engine.contract.speculation import PLAIN, Envelope, Settings
from pilotfish_engine.messages import SamplingParams
from pilotfish_engine.speculation.proposer import TargetHidden
from pilotfish_engine.speculation.step import Step
from pilotfish_engine.types import Admission, Chunk
from pilotfish_engine.worker.graphs import MOST_GRAPHS, recorder

# what makes a step's tensors largest: drawing among the likeliest, with penalties and log-probabilities
DEMANDING = SamplingParams(
    max_tokens=1, temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, logprobs=1
)
# what steps are recorded for, as a rule: where there is no room for others as well, these run as they are
SAMPLED = SamplingParams(max_tokens=1, temperature=1.0)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Needs:
    """Bytes beside weights, state and KV."""

    largest_pass: int
    graphs: int


@torch.inference_mode()
def measure_needs(step: Step, envelope: Envelope, chunk_size: int) -> Needs:
    """Leaves the state as it found it; what the passes took stays with the allocator, for those to come."""
    state = step.state
    rows = list(range(state.padding_row))
    before = torch.cuda.memory_allocated(state.device)
    _admit(step, rows, DEMANDING)
    try:
        _extend(step, rows, chunk_size)
        widest = _widest(step, envelope)
        for settings in dict.fromkeys([PLAIN, widest]):
            step(state.rows(rows), settings)
        torch.cuda.synchronize(state.device)
        largest_pass = torch.cuda.memory_reserved(state.device) - before
        _admit(step, rows, SAMPLED)
        return Needs(largest_pass, _graphs(step, rows, widest))
    finally:
        _admit(step, rows, GREEDY)
        for row in rows:
            state.release(row)


def _admit(step: Step, rows: Sequence[int], params: SamplingParams) -> None:
    for row in rows:
        step.state.release(row)
        step.state.admit(Admission(row, [0], 0, [], params, 0))


def _extend(step: Step, rows: Sequence[int], chunk_size: int) -> None:
    longest, left, chunks = step.state.length - 2, chunk_size, []
    for row in rows:
        if left > 0:
            chunks.append(Chunk(row, 0, min(left, longest), last=True))
            left -= chunks[-1].end
    inputs = over_spans(
        step.state, step.state.rows([c.row for c in chunks]), [0] * len(chunks), [c.end for c in chunks]
    )
    aux_layers = () if step.proposer is None else step.proposer.aux_layers
    hidden, aux = step.target.forward(inputs, step.kv, aux_layers)
    step.target.logits(hidden[: len(rows)])
    if step.proposer is not None:
        step.proposer.extend(chunks, TargetHidden(hidden, tuple(aux)))


def _widest(step: Step, envelope: Envelope) -> Settings:
    if step.proposer is None or envelope.num_steps == 0:
        return PLAIN
    return Settings(num_steps=envelope.num_steps, topk=envelope.topk, num_draft_tokens=envelope.num_draft_tokens)


def _graphs(step: Step, rows: Sequence[int], widest: Settings) -> int:
    """As many graphs as are kept share their tensors' memory; what the driver keeps of each is its own."""
    record = recorder(step)
    if record is None:
        return 0
    members = step.state.rows(rows)
    free = [torch.cuda.mem_get_info(step.state.device)[0]]
    kept = []
    for _ in range(3):
        kept.append(record(lambda: step(members, widest)))
        kept[-1]()  # the driver may take its part at the first launch
        torch.cuda.synchronize(step.state.device)
        free.append(torch.cuda.mem_get_info(step.state.device)[0])
    each = max(0, free[1] - free[3]) // 2
    kept.clear()
    return max(0, free[0] - free[1]) + (MOST_GRAPHS - 1) * each
