"""Passes over known tokens as ForwardInputs: ragged spans that the host knows, and the last rows that a step committed.

A pass over KV row i reads token i + shift: 0 for a model, more for a draft whose rows pair a state with a later token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model.inputs import ForwardInputs
from pilotfish_engine.model.memory import put


def over_spans(
    state: RequestState, rows: Rows, begins: Sequence[int], ends: Sequence[int], shift: int = 0
) -> ForwardInputs:
    """KV rows begins[i] … ends[i] − 1 of each of `rows`, in order; causal. Copies from the host: not for a step."""
    device = state.device
    counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
    row_of = torch.repeat_interleave(rows.index, put(counts, torch.int64, device), output_size=sum(counts))
    at = torch.cat([torch.arange(begin, end, device=device) for begin, end in zip(begins, ends, strict=True)])
    return ForwardInputs(
        token_ids=state.tokens[row_of, at + shift],
        positions=at,
        slots=state.slots(row_of, at.unsqueeze(1)).squeeze(1),
        attention=AttentionInputs(
            page_table=state.page_table[rows.index],
            prefix_lens=put(begins, torch.int32, device),
            q_indptr=put([0, *counts], torch.int32, device).cumsum(0, dtype=torch.int32),
            tree_mask=None,
        ),
    )


def last_places(inputs: ForwardInputs) -> Tensor:
    """int64 [B]: the place of each request's last token in the pass."""
    return (inputs.attention.q_indptr[1:] - 1).to(torch.int64)


def padded_rows(state: RequestState, rows: Rows, start: Tensor, counts: Tensor, width: int) -> tuple[Tensor, ...]:
    """KV rows start[i] … start[i] + counts[i] − 1 of each row, padded to `width`: real, positions and slots, [B, width]
    each. Padding has position 0 and the scratch slot. start, counts: int64 [B]."""
    offset = torch.arange(width, device=rows.device)
    real = offset < counts.unsqueeze(1)
    positions = torch.where(real, start.unsqueeze(1) + offset, 0)
    return real, positions, torch.where(real, state.slots(rows.index, positions), 0)


def over_padded_rows(
    state: RequestState, rows: Rows, start: Tensor, counts: Tensor, width: int, shift: int = 0
) -> ForwardInputs:
    """The pass over `padded_rows`; a step may make it."""
    real, positions, slots = padded_rows(state, rows, start, counts, width)
    batch, offset = len(rows), torch.arange(width, device=rows.device)
    return ForwardInputs(
        token_ids=state.tokens[rows.index.unsqueeze(1), positions + shift].flatten(),
        positions=positions.flatten(),
        slots=slots.flatten(),
        attention=AttentionInputs(
            page_table=state.page_table[rows.index],
            prefix_lens=start.to(torch.int32),
            q_indptr=torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device=rows.device),
            # causal, but that padding sees none of the rows past the last real one, which were never written
            tree_mask=torch.where(real, (2 << offset) - 1, 0).flatten(),
        ),
    )


def last_padded_places(counts: Tensor, width: int) -> Tensor:
    """int64 [B]: the place of each row's last real token in a pass over padded rows; its first where it has none."""
    return torch.arange(counts.shape[0], device=counts.device) * width + (counts - 1).clamp_min(0)
