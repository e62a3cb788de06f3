"""Standalone drafts: a small causal LM of the target's vocabulary runs ahead, with its own KV pool under the target's
pages.

The draft's KV covers every known token of a row, the bonus token included, so it is one row ahead of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pilotfish_engine.batch.passes import last_padded_places, last_places, over_padded_rows, over_spans
from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.methods import Limit, Limits
from pilotfish_engine.contract.speculation import MAX_TOPK, Settings
from pilotfish_engine.model.checkpoint import check_tensors, open_checkpoint
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.layers import reading
from pilotfish_engine.model.loading import load
from pilotfish_engine.speculation.growth import Frontier, Places, grow, rows_needed
from pilotfish_engine.speculation.proposer import Models, ProposerContext, TargetHidden
from pilotfish_engine.speculation.tree import Candidates
from pilotfish_engine.speculation.unread import Unread
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.speculation.vocabulary import Vocabulary
from pilotfish_engine.types import Chunk


class StandaloneProposer:
    aux_layers: tuple[int, ...] = ()
    lookahead = 0

    def __init__(self, draft: Decoder, state: RequestState, num_pages: int, page_size: int) -> None:
        self._draft = draft
        self._state = state
        self.kv = draft.new_kv_cache(num_pages, page_size)
        self._unread = Unread(state, 0, draft.dtype)
        self._ahead = state.kept.new_numbers("ahead")  # 1: a chunk of the prompt was read, and the token after it too
        self._vocabulary = Vocabulary(torch.arange(draft.num_tokens, device=state.device), state.vocab_size)
        self.max_topk = min(MAX_TOPK, self._vocabulary.size)
        # the draft's best next tokens after the last known token of each row, best first, with their log-probabilities
        self._next_ids = state.kept.new("next ids", (self.max_topk,), torch.int64)
        self._next_scores = state.kept.new("next scores", (self.max_topk,), torch.float32)

    def slots_needed(self, settings: Settings) -> int:
        # the bonus token's row, then those of the tree
        return 1 + rows_needed(settings.num_steps, settings.topk)

    def admit(self, row: int, cached_len: int) -> None:
        self._unread.admit(row)
        self._ahead[row] = 0

    def reusable_len(self, row: int, seq_len: int) -> int:
        return min(seq_len, seq_len + 1 - self._unread.lag(row))

    def extend(self, chunks: Sequence[Chunk], target: TargetHidden) -> None:
        """A chunk's tokens and the one after it: the draft stays one row ahead, so a later chunk begins one further."""
        rows = self._state.rows([chunk.row for chunk in chunks])
        begins = [chunk.start + self._ahead[chunk.row] for chunk in chunks]
        inputs = over_spans(self._state, rows, begins, [chunk.end + 1 for chunk in chunks])
        hidden, _ = self._draft.forward(inputs, self.kv)
        self._keep_best(rows, hidden[last_places(inputs)])
        for chunk in chunks:
            self._ahead[chunk.row] = int(not chunk.last)

    def due(self, rows: Rows, settings: Settings) -> list[int] | None:
        return self._unread.due(rows, settings.num_steps)

    def catch_up(self, rows: Rows, counts: torch.Tensor, width: int) -> None:
        self._read_last(rows, counts, width)

    def propose(self, rows: Rows, settings: Settings) -> Candidates:
        k = settings.topk
        first = self._state.seq_lens[rows.index] + 1
        token_rows = rows.repeated(k)
        places = Places(self._state, rows, first, settings.num_steps - 1, k)

        def run(frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = places.inputs(frontier)
            hidden, _ = self._draft.forward(inputs, self.kv)
            scores, ids = self._best(hidden, token_rows, inputs.positions + 1, k)
            return ids.view(-1, k, k), scores.view(-1, k, k)

        return grow(self._next_ids[rows.index, :k], self._next_scores[rows.index, :k], settings.num_steps, run)

    def accepted(self, rows: Rows, settings: Settings, verdict: Verdict, target: TargetHidden) -> None:
        self._read_last(rows, verdict.accept_lens, verdict.path.shape[1])

    def skipped(self, rows: Rows, target: TargetHidden) -> None:
        self._unread.keep(rows, target.hidden[:, :0])

    def _read_last(self, rows: Rows, counts: torch.Tensor, width: int) -> None:
        """The draft reads the last counts[i] ≤ width known tokens of each row (int64 [B]); 0 leaves a row as it is."""
        start = self._state.seq_lens[rows.index] + 1 - counts
        inputs = over_padded_rows(self._state, rows, start, counts, width)
        hidden, _ = self._draft.forward(inputs, self.kv)
        self._keep_best(rows, hidden[last_padded_places(counts, width)], counts > 0)

    def _best(
        self, hidden: torch.Tensor, rows: Rows, positions: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and ids of the best k tokens for each of `positions` of `rows`, [N, k]."""
        logits = self._vocabulary.known(self._draft.logits(hidden))
        return self._state.best_drafts(logits, rows, positions, k)

    def _keep_best(
        self,
        rows: Rows,
        hidden: torch.Tensor,
        changed: torch.Tensor | None = None,
    ) -> None:
        scores, ids = self._best(hidden, rows, self._state.seq_lens[rows.index] + 1, self.max_topk)
        if changed is not None:
            ids = torch.where(changed.unsqueeze(1), ids, self._next_ids[rows.index])
            scores = torch.where(changed.unsqueeze(1), scores, self._next_scores[rows.index])
        self._next_ids[rows.index] = ids
        self._next_scores[rows.index] = scores


def recognises(models: Models) -> bool:
    return models.draft is not None


def check(models: Models) -> Limits:
    assert models.draft is not None, "the registry has checked that a draft is given"
    checkpoint = open_checkpoint(models.draft)
    vocabulary = checkpoint.shape.vocab_size
    models.check_vocabulary(models.draft, vocabulary)
    check_tensors(checkpoint)
    return Limits(topk=Limit(vocabulary, f"the draft {models.draft} knows {vocabulary} tokens"))


def build(context: ProposerContext) -> StandaloneProposer:
    assert context.models.draft is not None, "the registry has checked that a draft is given"
    state = context.state
    draft = load(context.models.draft, context.dtype, state.device, max_positions=state.length)
    draft.embed = reading(draft.embed, context.target.num_tokens)
    return StandaloneProposer(draft, state, context.num_pages, context.page_size)
