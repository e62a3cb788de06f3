"""One decode step of a batch, for every method and for none: draft → verify → commit.

Tensor code over fixed shapes; nothing here copies to the host, branches on data or loops over requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.sampling.draw import choose
from pilotfish_engine.speculation.proposer import Proposer, TargetHidden
from pilotfish_engine.speculation.tree import DraftTree, cut, root_only
from pilotfish_engine.speculation.verify import Verdict, verify
from pilotfish_engine.worker.inputs import ForwardInputs, KVCache
from pilotfish_engine.worker.state import RequestState


@dataclass(frozen=True)
class StepResult:
    """next_token_ids: int32 [B * num_draft_tokens], strided by it; accept_lens, draft_lens: int32 [B]."""

    next_token_ids: torch.Tensor
    accept_lens: torch.Tensor
    draft_lens: torch.Tensor
    num_draft_tokens: int


@dataclass(frozen=True)
class Step:
    target: Decoder
    kv: KVCache
    state: RequestState
    proposer: Proposer | None

    def __call__(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> StepResult:
        """rows: int64 [B] on the device, `host_rows` the same on the host, which knows of them what needs no copy."""
        tree = self.draft(rows, host_rows, settings)
        target_ids, hidden = self.target_pass(rows, host_rows, tree)
        verdict = verify(tree, target_ids, settings.num_steps)
        self.commit(rows, host_rows, settings, verdict, hidden)
        return StepResult(
            next_token_ids=verdict.next_token_ids.flatten().to(torch.int32),
            accept_lens=verdict.accept_lens.to(torch.int32),
            draft_lens=(tree.real.sum(dim=1) - 1).to(torch.int32),
            num_draft_tokens=verdict.next_token_ids.shape[1],
        )

    def draft(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> DraftTree:
        """The nodes to verify under each row's last known token."""
        lens = self.state.seq_lens[rows].unsqueeze(1)
        root_ids = self.state.tokens[rows].gather(1, lens).squeeze(1)
        if self.proposer is None or settings.num_steps == 0:
            return root_only(root_ids)
        candidates = self.proposer.propose(rows, host_rows, settings)
        return cut(root_ids, candidates, settings.num_draft_tokens, settings.num_steps)

    def target_pass(
        self, rows: torch.Tensor, host_rows: Sequence[int], tree: DraftTree
    ) -> tuple[torch.Tensor, TargetHidden]:
        """The target's token after each node, int64 [B, W], and the hidden states by place in the pass."""
        prefix = self.state.seq_lens[rows]
        token_rows = rows[tree.request]
        positions = tree.packed(prefix.unsqueeze(1) + tree.depth)
        # node j of a request lives in KV row seq_len + j, whatever its depth; padding in the scratch page
        slots = self.state.slots(token_rows, (prefix[tree.request] + tree.node).unsqueeze(1)).squeeze(1)
        inputs = ForwardInputs(
            token_ids=tree.packed(tree.token_ids),
            positions=positions,
            slots=torch.where(tree.used, slots, 0),
            page_table=self.state.page_table[rows],
            prefix_lens=prefix.to(torch.int32),
            q_indptr=tree.indptr,
            tree_mask=tree.packed(tree.ancestors),
        )
        aux_layers = self.proposer.aux_layers if self.proposer is not None else ()
        hidden, aux = self.target.forward(inputs, self.kv, aux_layers)
        drawn = choose(self.target.logits(hidden), positions + 1, self.state.sampling(token_rows, host_rows))
        return drawn[tree.flat], TargetHidden(hidden, tuple(aux))

    def commit(
        self,
        rows: torch.Tensor,
        host_rows: Sequence[int],
        settings: Settings,
        verdict: Verdict,
        hidden: TargetHidden,
    ) -> None:
        """Target KV, known tokens and the method's own state move to behind the accepted path."""
        if settings.topk > 1 and settings.num_steps > 0:
            self._move_accepted(rows, verdict.path)
        self.state.commit(rows, verdict.next_token_ids, verdict.accept_lens)
        if self.proposer is None:
            return
        if settings.num_steps == 0:
            self.proposer.skipped(rows, host_rows, hidden)
        else:
            self.proposer.accepted(rows, host_rows, settings, verdict, hidden)

    def _move_accepted(self, rows: torch.Tensor, path: torch.Tensor) -> None:
        """KV of the accepted node of depth d moves to row seq_len + d; a chain would have nothing to move.

        Everything is read before anything is written, and rows past accept_lens read and write the root's row.
        """
        base = self.state.seq_lens[rows].unsqueeze(1)
        depth = torch.arange(path.shape[1], device=rows.device).expand_as(path)
        source = self.state.slots(rows, base + path).flatten()
        goal = self.state.slots(rows, base + torch.where(path > 0, depth, 0)).flatten()
        for pool in (self.kv.k, self.kv.v):
            pool[:, goal] = pool[:, source]
