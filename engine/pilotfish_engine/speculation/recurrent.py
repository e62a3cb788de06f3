"""Drafts with a head that reads the target's states, then its own output.

Row i of the head's KV holds the target's features of position i beside token i + 1, so the head has as many rows as the
target, and row i is right only for this pair of tokens (`lookahead` 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from pilotfish_engine.batch.passes import last_padded_places, last_places, over_padded_rows, over_spans
from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.speculation import MAX_TOPK, Settings
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.speculation.growth import Frontier, Places, grow, rows_needed
from pilotfish_engine.speculation.proposer import TargetHidden
from pilotfish_engine.speculation.tree import Candidates
from pilotfish_engine.speculation.unread import Unread
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.speculation.vocabulary import Vocabulary
from pilotfish_engine.types import Chunk


class RecurrentHead(Protocol):
    """aux_layers: target layers whose input residual stream is read (num_layers: after the last one, before the norm).
    vocab_size: of its tokens. feature_size: of what it reads of one token."""

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def feature_size(self) -> int: ...

    def new_kv_cache(self, num_pages: int, page_size: int) -> KVCache: ...

    def features(self, target: TargetHidden) -> Tensor:
        """[N, feature_size]: what is kept of the target's pass for each token."""
        ...

    def combine(self, features: Tensor) -> Tensor:
        """[N, feature_size] → [N, H]."""
        ...

    def forward(self, hidden: Tensor, inputs: ForwardInputs, kv: KVCache) -> tuple[Tensor, Tensor]:
        """hidden [N, H] of positions i beside tokens i + 1 → (what `logits` reads, what recurs), each [N, H] or of the
        tokens that inputs.kept says."""
        ...

    def logits(self, out: Tensor) -> Tensor:
        """float32 [M, V] of the first V ≤ vocab_size tokens, beyond which none is the target's."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's token ids of the head's own, int64."""
        ...


class RecurrentProposer:
    lookahead = 1

    def __init__(self, head: RecurrentHead, state: RequestState, num_pages: int, page_size: int) -> None:
        self.aux_layers = head.aux_layers
        self.kv = head.new_kv_cache(num_pages, page_size)
        self._head = head
        self._state = state
        self._vocabulary = Vocabulary(
            head.target_ids(torch.arange(head.vocab_size, device=state.device)), state.vocab_size
        )
        self.max_topk = min(MAX_TOPK, self._vocabulary.size)
        dtype, device = self.kv.k.dtype, state.device
        self._unread = Unread(state, head.feature_size, dtype)
        hidden_size = head.combine(torch.zeros(1, head.feature_size, dtype=dtype, device=device)).shape[1]
        # after the last known token of each row: what recurs, and the best next tokens with their log-probabilities
        self._hidden = state.kept.new("recurring", (hidden_size,), dtype)
        self._next_ids = state.kept.new("next ids", (self.max_topk,), torch.int64)
        self._next_scores = state.kept.new("next scores", (self.max_topk,), torch.float32)

    def slots_needed(self, settings: Settings) -> int:
        return rows_needed(settings.num_steps, settings.topk)

    def admit(self, row: int, cached_len: int) -> None:
        self._unread.admit(row)

    def reusable_len(self, row: int, seq_len: int) -> int:
        return seq_len - self._unread.lag(row)

    def extend(self, chunks: Sequence[Chunk], target: TargetHidden) -> None:
        rows = self._state.rows([chunk.row for chunk in chunks])
        inputs = over_spans(self._state, rows, [c.start for c in chunks], [c.end for c in chunks], shift=1)
        inputs = replace(inputs, only=last_places(inputs))
        out, hidden = self._head.forward(self._head.combine(self._head.features(target)), inputs, self.kv)
        self._keep_best(rows, out, hidden)

    def due(self, rows: Rows, settings: Settings) -> list[int] | None:
        return self._unread.due(rows, settings.num_steps)

    def catch_up(self, rows: Rows, counts: Tensor, width: int) -> None:
        self._read_last(rows, counts, self._unread.features(rows, counts, width), changed=counts > 0)

    def propose(self, rows: Rows, settings: Settings) -> Candidates:
        k = settings.topk
        first = self._state.seq_lens[rows.index]
        recurring = self._hidden[rows.index].unsqueeze(1)  # [B, nodes of the depth before, H]
        token_rows = rows.repeated(k)
        places = Places(self._state, rows, first, settings.num_steps - 1, k)

        def run(frontier: Frontier) -> tuple[Tensor, Tensor]:
            nonlocal recurring
            came_from = frontier.came_from.unsqueeze(2).expand(-1, -1, recurring.shape[2])
            inputs = places.inputs(frontier)
            out, hidden = self._head.forward(recurring.gather(1, came_from).flatten(0, 1), inputs, self.kv)
            recurring = hidden.view(len(rows), k, -1)
            ids, scores = self._best(out, token_rows, inputs.positions + 2, k)
            return ids.view(-1, k, k), scores.view(-1, k, k)

        return grow(self._next_ids[rows.index, :k], self._next_scores[rows.index, :k], settings.num_steps, run)

    def accepted(self, rows: Rows, settings: Settings, verdict: Verdict, target: TargetHidden) -> None:
        features = self._head.features(target)[verdict.flat]  # [B, D, feature_size]
        self._read_last(rows, verdict.accept_lens, features)

    def skipped(self, rows: Rows, target: TargetHidden) -> None:
        self._unread.keep(rows, self._head.features(target))

    def _read_last(
        self,
        rows: Rows,
        counts: Tensor,
        features: Tensor,
        changed: Tensor | None = None,
    ) -> None:
        """The head reads the last counts[i] ≤ D positions of each row (int64 [B]); features: [B, D, feature_size], of
        the first counts[i] of them in order, the rest is padding. changed: bool [B], the others stay as they are and
        have counts of 0; None: all are changed."""
        width = features.shape[1]
        start = self._state.seq_lens[rows.index] - counts
        inputs = over_padded_rows(self._state, rows, start, counts, width, shift=1)
        inputs = replace(inputs, only=last_padded_places(counts, width))
        out, hidden = self._head.forward(self._head.combine(features.flatten(0, 1)), inputs, self.kv)
        self._keep_best(rows, out, hidden, changed)

    def _best(self, out: Tensor, rows: Rows, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best k tokens for each of `positions` of `rows`, and their log-probabilities, [N, k]."""
        vocabulary = self._vocabulary
        logits = vocabulary.known(self._head.logits(out))
        scores, places = self._state.best_drafts(logits, rows, positions, k, vocabulary.ids)
        return vocabulary.ids[places], scores

    def _keep_best(self, rows: Rows, out: Tensor, hidden: Tensor, changed: Tensor | None = None) -> None:
        ids, scores = self._best(out, rows, self._state.seq_lens[rows.index] + 1, self.max_topk)
        if changed is not None:
            changed = changed.unsqueeze(1)
            ids = torch.where(changed, ids, self._next_ids[rows.index])
            scores = torch.where(changed, scores, self._next_scores[rows.index])
            hidden = torch.where(changed, hidden, self._hidden[rows.index])
        self._next_ids[rows.index] = ids
        self._next_scores[rows.index] = scores
        self._hidden[rows.index] = hidden
