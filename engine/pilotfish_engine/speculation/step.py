"""One decode step of a batch, for every method and for none: draft → verify → commit.

Tensor code over fixed shapes; nothing here copies to the host, branches on data or loops over requests. The masks of a
grammar are made on the host between draft and target pass, only while such a request is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.errors import MethodError
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.memory import put
from pilotfish_engine.sampling.grammar_rows import TreeNodes
from pilotfish_engine.sampling.logprobs import Logprobs, score
from pilotfish_engine.sampling.processors import Paths
from pilotfish_engine.speculation.proposer import Proposer, TargetHidden
from pilotfish_engine.speculation.tree import DraftTree, cut, most_candidates, root_only
from pilotfish_engine.speculation.verify import Verdict, verify


@dataclass(frozen=True)
class StepResult:
    """next_token_ids: int32 [B * num_draft_tokens], strided by it; draw.NONE where the logits give no token.
    accept_lens, draft_lens: int32 [B]. logprobs: of next_token_ids, where a row asks for them."""

    next_token_ids: torch.Tensor
    accept_lens: torch.Tensor
    draft_lens: torch.Tensor
    num_draft_tokens: int
    logprobs: Logprobs | None


@dataclass(frozen=True)
class Step:
    """ranks: those that share the target, where it is shared: what rank 0 drafts and decides holds on all of them."""

    target: Decoder
    kv: KVCache
    state: RequestState
    proposer: Proposer | None
    ranks: Ranks | None = None

    def __call__(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> StepResult:
        """rows: int64 [B] on the device, `host_rows` the same on the host, which knows of them what needs no copy. A
        row of padding may occur several times."""
        self.prepare(rows, host_rows, settings)
        return self.run(rows, host_rows, settings)

    def prepare(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> None:
        """Before the step itself: the draft reads what plain steps left, where that is due. The host plans and copies
        nothing after it, but for grammars."""
        counts = self.due(host_rows, settings)
        if counts is not None:
            on_device = put(counts, torch.int64, rows.device)
            self.catch_up(rows, host_rows, on_device, max(counts))

    def due(self, host_rows: Sequence[int], settings: Settings) -> list[int] | None:
        """As Proposer.due."""
        return None if self.proposer is None else self.proposer.due(host_rows, settings)

    def catch_up(self, rows: torch.Tensor, host_rows: Sequence[int], counts: torch.Tensor, width: int) -> None:
        """As Proposer.catch_up."""
        assert self.proposer is not None, "without a draft nothing is due"
        self.proposer.catch_up(rows, host_rows, counts, width)

    def run(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> StepResult:
        """The step itself: `draft`, `allowed` and `judge`. The first and the last are the same work for all rows of
        which `state.traits` are the same."""
        tree = self.draft(rows, host_rows, settings)
        return self.judge(rows, host_rows, settings, tree, self.allowed(host_rows, tree))

    def judge(
        self,
        rows: torch.Tensor,
        host_rows: Sequence[int],
        settings: Settings,
        tree: DraftTree,
        allowed: torch.Tensor | None,
    ) -> StepResult:
        """What follows the draft: the target's pass, its verdict, and what becomes of that."""
        target_ids, hidden, logits = self.target_pass(rows, host_rows, tree, settings.num_steps, allowed)
        verdict = verify(tree, target_ids, settings.num_steps)
        if self.ranks is not None:
            verdict = verdict.broadcast(self.ranks)
        # where there is no token the host ends the request; until then it goes on from a token like any other
        known = replace(verdict, next_token_ids=verdict.next_token_ids.clamp_min(0))
        self.commit(rows, host_rows, settings, known, hidden)
        logprobs = None
        if self.state.scored(host_rows):
            logprobs = score(logits[verdict.flat.flatten()], known.next_token_ids.flatten())
        return StepResult(
            next_token_ids=verdict.next_token_ids.flatten().to(torch.int32),
            accept_lens=verdict.accept_lens.to(torch.int32),
            draft_lens=(tree.real.sum(dim=1) - 1).to(torch.int32),
            num_draft_tokens=verdict.next_token_ids.shape[1],
            logprobs=logprobs,
        )

    def draft(self, rows: torch.Tensor, host_rows: Sequence[int], settings: Settings) -> DraftTree:
        """The nodes to verify under each row's last known token."""
        root_ids = self.state.tokens[rows, self.state.seq_lens[rows]]
        if self.proposer is None or settings.num_steps == 0:
            return root_only(root_ids)
        candidates = self.proposer.propose(rows, host_rows, settings)
        if self.ranks is not None:
            candidates = candidates.broadcast(self.ranks)
        offered, most = candidates.token_ids.shape[1], most_candidates(settings)
        if offered > most:  # more nodes than rows are reserved for
            raise MethodError(
                f"the method offers {offered} candidates, and topk {settings.topk} with num_steps {settings.num_steps} "
                f"make at most {most}"
            )
        if settings.topk == 1:
            candidates = candidates.as_chain()
        candidates = candidates.only(rows != self.state.padding_row)
        return cut(root_ids, candidates, settings.num_draft_tokens, settings.num_steps)

    def allowed(self, host_rows: Sequence[int], tree: DraftTree) -> torch.Tensor | None:
        """What grammars let follow each place of the pass, as `target_pass` takes it: the host's work. None: no row has
        one."""
        nodes = TreeNodes(tree.token_ids, tree.parents, tree.real, tree.flat, tree.request.shape[0])
        return self.state.grammars.allowed(host_rows, nodes if tree.token_ids.shape[1] > 1 else None)

    def target_pass(
        self,
        rows: torch.Tensor,
        host_rows: Sequence[int],
        tree: DraftTree,
        num_steps: int,
        allowed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, TargetHidden, torch.Tensor]:
        """The target's token after each node, int64 [B, W]; and by place in the pass the hidden states and the logits
        float32 [N, V]. num_steps bounds the tree's depth; allowed: what grammars let follow each place."""
        prefix = self.state.seq_lens[rows]
        token_rows = rows[tree.request]
        positions = tree.packed(prefix.unsqueeze(1) + tree.depth)
        # node j of a request lives in KV row seq_len + j, whatever its depth; padding in the scratch page
        slots = self.state.slots(token_rows, (prefix[tree.request] + tree.node).unsqueeze(1)).squeeze(1)
        inputs = ForwardInputs(
            token_ids=tree.packed(tree.token_ids),
            positions=positions,
            slots=torch.where(tree.used, slots, 0),
            attention=AttentionInputs(
                page_table=self.state.page_table[rows],
                prefix_lens=prefix.to(torch.int32),
                q_indptr=tree.indptr,
                tree_mask=tree.packed(tree.ancestors),
            ),
        )
        aux_layers = self.proposer.aux_layers if self.proposer is not None else ()
        hidden, aux = self.target.forward(inputs, self.kv, aux_layers)
        logits = self.target.logits(hidden)
        paths = None
        if self.state.penalised(host_rows):
            paths = Paths(inputs.token_ids, tree.packed(tree.flat.gather(1, tree.parents)), num_steps)
        drawn = self.state.choose(logits, token_rows, positions + 1, host_rows, paths, allowed)
        return drawn[tree.flat], TargetHidden(hidden, tuple(aux)), logits

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
        self.state.count(rows, host_rows, verdict.next_token_ids, verdict.accept_lens)
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
