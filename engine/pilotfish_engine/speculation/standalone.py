"""Standalone drafts: a small causal LM of the target's vocabulary runs ahead, with its own KV pool under the target's
pages.

The draft's KV covers every known token of a row, the bonus token included, so it is one row ahead of the target's.
`_lag` counts, on the host, how many of a row's last known tokens the draft has not read yet: a plain step adds one,
and they are read together (draft-extend) every CATCH_UP plain steps or before the row is drafted for again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pilotfish_engine.contract.speculation import MAX_TOPK, Envelope, Settings
from pilotfish_engine.errors import MethodError
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.loading import load, read_shape
from pilotfish_engine.speculation.growth import Frontier, grow, rows_needed
from pilotfish_engine.speculation.proposer import Models, ProposerContext, TargetHidden
from pilotfish_engine.speculation.tree import Candidates
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.types import Chunk
from pilotfish_engine.worker.inputs import ForwardInputs
from pilotfish_engine.worker.state import RequestState

CATCH_UP = 16


class StandaloneProposer:
    aux_layers: tuple[int, ...] = ()
    lookahead = 0

    def __init__(self, draft: Decoder, state: RequestState, num_pages: int, page_size: int) -> None:
        rows = state.seq_lens.shape[0]
        self._draft = draft
        self._state = state
        self.kv = draft.new_kv_cache(num_pages, page_size)
        self._lag = [0] * rows
        self.max_topk = min(MAX_TOPK, draft.shape.vocab_size)
        # the draft's best next tokens after the last known token of each row, best first, with their log-probabilities
        self._next_ids = torch.zeros(rows, self.max_topk, dtype=torch.int64, device=state.device)
        self._next_scores = torch.zeros(rows, self.max_topk, dtype=torch.float32, device=state.device)

    def slots_needed(self, settings: Settings) -> int:
        # the bonus token's row, then those of the tree
        return 1 + rows_needed(settings.num_steps, settings.topk)

    def admit(self, row: int, cached_len: int) -> None:
        self._lag[row] = 0

    def reusable_len(self, row: int, seq_len: int) -> int:
        return min(seq_len, seq_len + 1 - self._lag[row])

    def extend(self, chunks: Sequence[Chunk], target: TargetHidden) -> None:
        """A chunk's tokens and the one after it: the draft stays one row ahead, so a later chunk begins one further."""
        state = self._state
        first = [chunk.start if self._lag[chunk.row] == 0 else chunk.start + 1 for chunk in chunks]
        counts = [chunk.end + 1 - begin for chunk, begin in zip(chunks, first, strict=True)]
        rows = state.row_index([chunk.row for chunk in chunks])
        row_of = torch.repeat_interleave(rows, torch.tensor(counts, device=rows.device), output_size=sum(counts))
        positions = torch.cat([torch.arange(f, f + n, device=rows.device) for f, n in zip(first, counts, strict=True)])
        indptr = torch.tensor([0, *counts], dtype=torch.int32, device=rows.device).cumsum(0, dtype=torch.int32)
        inputs = ForwardInputs(
            token_ids=state.tokens[row_of, positions],
            positions=positions,
            slots=state.slots(row_of, positions.unsqueeze(1)).squeeze(1),
            page_table=state.page_table[rows],
            prefix_lens=torch.tensor(first, dtype=torch.int32, device=rows.device),
            q_indptr=indptr,
            tree_mask=None,
        )
        hidden, _ = self._draft.forward(inputs, self.kv)
        self._keep_best(rows, [chunk.row for chunk in chunks], hidden[(indptr[1:] - 1).to(torch.int64)])
        for chunk in chunks:
            self._lag[chunk.row] = 0 if chunk.last else -1

    def propose(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> Candidates:
        self._catch_up(rows, host_rows)
        k = settings.topk
        first = self._state.seq_lens[rows] + 1

        def run(frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = frontier.inputs(self._state, rows, first)
            hidden, _ = self._draft.forward(inputs, self.kv)
            token_rows = rows.repeat_interleave(k, output_size=len(host_rows) * k)
            scores, ids = self._best(hidden, token_rows, inputs.positions + 1, host_rows, k)
            return ids.view(-1, k, k), scores.view(-1, k, k)

        return grow(self._next_ids[rows, :k], self._next_scores[rows, :k], settings.num_steps, run)

    def accepted(
        self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings, verdict: Verdict, target: TargetHidden
    ) -> None:
        self._read_last(rows, host_rows, verdict.accept_lens, verdict.path.shape[1])

    def skipped(self, rows: torch.Tensor, host_rows: Sequence[int], target: TargetHidden) -> None:
        for row in host_rows:
            self._lag[row] += 1
        if max(self._lag[row] for row in host_rows) >= CATCH_UP:
            self._catch_up(rows, host_rows)

    def _catch_up(self, rows: torch.Tensor, host_rows: Sequence[int]) -> None:
        lags = [self._lag[row] for row in host_rows]
        if max(lags) == 0:
            return
        self._read_last(rows, host_rows, self._state.row_index(lags), max(lags))
        for row in host_rows:
            self._lag[row] = 0

    def _read_last(self, rows: torch.Tensor, host_rows: Sequence[int], counts: torch.Tensor, width: int) -> None:
        """The draft reads the last counts[i] ≤ width known tokens of each row (int64 [B]); 0 leaves a row as it is."""
        state = self._state
        start = state.seq_lens[rows] + 1 - counts
        offset = torch.arange(width, device=rows.device)
        real = offset < counts.unsqueeze(1)
        positions = torch.where(real, start.unsqueeze(1) + offset, 0)
        slots = torch.where(real, state.slots(rows, positions), 0)
        inputs = ForwardInputs(
            token_ids=state.tokens[rows].gather(1, positions).flatten(),
            positions=positions.flatten(),
            slots=slots.flatten(),
            page_table=state.page_table[rows],
            prefix_lens=start.to(torch.int32),
            q_indptr=torch.arange(0, (rows.shape[0] + 1) * width, width, dtype=torch.int32, device=rows.device),
            # causal, but that padding sees none of the rows past the last real one, which were never written
            tree_mask=torch.where(real, (2 << offset) - 1, 0).flatten(),
        )
        hidden, _ = self._draft.forward(inputs, self.kv)
        last = torch.arange(rows.shape[0], device=rows.device) * width + (counts - 1).clamp_min(0)
        self._keep_best(rows, host_rows, hidden[last], counts > 0)

    def _best(
        self, hidden: torch.Tensor, token_rows: torch.Tensor, positions: torch.Tensor, host_rows: Sequence[int], k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and ids of the best k tokens for each `positions`, [N, k]."""
        logits = self._draft.logits(hidden)
        scores, ids = self._state.draft_scores(logits, token_rows, positions, host_rows).topk(k, dim=1)
        return scores, ids

    def _keep_best(
        self,
        rows: torch.Tensor,
        host_rows: Sequence[int],
        hidden: torch.Tensor,
        changed: torch.Tensor | None = None,
    ) -> None:
        scores, ids = self._best(hidden, rows, self._state.seq_lens[rows] + 1, host_rows, self.max_topk)
        if changed is not None:
            ids = torch.where(changed.unsqueeze(1), ids, self._next_ids[rows])
            scores = torch.where(changed.unsqueeze(1), scores, self._next_scores[rows])
        self._next_ids[rows] = ids
        self._next_scores[rows] = scores


def recognises(models: Models) -> bool:
    return models.draft is not None


def check(models: Models, envelope: Envelope) -> None:
    assert models.draft is not None, "the registry has checked that a draft is given"
    vocabulary = read_shape(models.draft).vocab_size
    models.check_vocabulary(models.draft, vocabulary)
    if envelope.topk > vocabulary:
        raise MethodError(f"topk is {envelope.topk}, and the draft knows {vocabulary} tokens; at most that would work")


def build(context: ProposerContext) -> StandaloneProposer:
    assert context.models.draft is not None, "the registry has checked that a draft is given"
    state = context.state
    draft = load(context.models.draft, context.dtype, state.device, max_positions=state.length)
    return StandaloneProposer(draft, state, context.num_pages, context.page_size)
