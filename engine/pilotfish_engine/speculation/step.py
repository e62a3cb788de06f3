"""One decode step of a batch, for every method and for none: draft → forward → verify → commit.

Tensor code over fixed shapes; nothing here copies to the host, branches on data or loops over requests. The masks of a
grammar are made on the host while the target's pass runs, only while such a request is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.errors import MethodError
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.memory import put
from pilotfish_engine.sampling.logprobs import Logprobs, score
from pilotfish_engine.sampling.processors import Paths
from pilotfish_engine.speculation.proposer import Proposer, TargetHidden
from pilotfish_engine.speculation.tree import DraftTree, cut, most_candidates, root_only
from pilotfish_engine.speculation.verify import Verdict, verify
from pilotfish_engine.types import Traits


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
class Passed:
    """The target's pass over a tree, by its N places: int64 token_ids and positions of the tokens to come, the hidden
    states and the logits, float32 [N, V]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    hidden: TargetHidden
    logits: torch.Tensor


@dataclass(frozen=True)
class Step:
    """ranks: those that share the target, where it is shared: what rank 0 drafts and decides holds on all of them."""

    target: Decoder
    kv: KVCache
    state: RequestState
    proposer: Proposer | None
    ranks: Ranks | None = None

    def __call__(self, rows: Rows, settings: Settings) -> StepResult:
        """Drafts, verifies, commits. Where the draft has read all that it has to, which is `catch_up`'s: so it is the
        same work for all rows of the same traits, but for the masks of a grammar."""
        tree = self.draft(rows, settings)
        asked = self.state.grammars.ask(rows.host, tree.nodes)
        passed = self.forward(rows, tree)
        return self.judge(rows, settings, tree, passed, self.state.grammars.allowed(asked))

    def judge(
        self, rows: Rows, settings: Settings, tree: DraftTree, passed: Passed, allowed: torch.Tensor | None = None
    ) -> StepResult:
        """Verifies and commits."""
        return self.commit(rows, settings, tree, passed, self.verify(rows, tree, passed, settings.num_steps, allowed))

    @property
    def caches(self) -> list[KVCache]:
        """The target's, and the draft's where it has one."""
        own: KVCache | None = getattr(self.proposer, "kv", None)
        return [self.kv] if own is None else [self.kv, own]

    def catch_up(self, rows: Rows, settings: Settings) -> None:
        """Lets the draft read what plain steps left, where that is due. The host plans and copies nothing after it."""
        counts = None if self.proposer is None else self.proposer.due(rows, settings)
        if self.proposer is not None and counts is not None:
            self.proposer.catch_up(rows, put(counts, torch.int64, rows.device), max(counts))

    def draft(self, rows: Rows, settings: Settings) -> DraftTree:
        """Returns the nodes to verify under each row's last known token."""
        root_ids = self.state.tokens[rows.index, self.state.seq_lens[rows.index]]
        if self.proposer is None or settings.num_steps == 0:
            return root_only(root_ids)
        candidates = self.proposer.propose(rows, settings)
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
        candidates = candidates.only(rows.index != self.state.padding_row)
        return cut(root_ids, candidates, settings.num_draft_tokens, settings.num_steps)

    def forward(self, rows: Rows, tree: DraftTree) -> Passed:
        """Runs the target over a tree's nodes, and writes their KV behind what is committed."""
        state, prefix = self.state, self.state.seq_lens[rows.index]
        token_rows = rows.of(tree.request)
        positions = tree.packed(prefix.unsqueeze(1) + tree.depth)
        # node j of a request lives in KV row seq_len + j, whatever its depth; padding in the scratch page
        slots = state.slots(token_rows.index, (prefix[tree.request] + tree.node).unsqueeze(1)).squeeze(1)
        inputs = ForwardInputs(
            token_ids=tree.packed(tree.token_ids),
            positions=positions,
            slots=torch.where(tree.used, slots, 0),
            attention=AttentionInputs(
                page_table=state.page_table[rows.index],
                prefix_lens=prefix.to(torch.int32),
                q_indptr=tree.indptr,
                tree_mask=tree.packed(tree.ancestors),
            ),
        )
        hidden, aux = self.target.forward(inputs, self.kv, () if self.proposer is None else self.proposer.aux_layers)
        logits = self.target.logits(hidden)
        return Passed(inputs.token_ids, positions + 1, TargetHidden(hidden, tuple(aux)), logits)

    def verify(
        self, rows: Rows, tree: DraftTree, passed: Passed, num_steps: int, allowed: torch.Tensor | None = None
    ) -> Verdict:
        """Draws the target's own token after each node, and takes the path that agrees. It is draw.NONE where the
        logits give none. num_steps bounds the tree's depth; allowed: what grammars let follow each place."""
        paths = None
        if Traits.PENALISED in rows.traits:
            paths = Paths(passed.token_ids, tree.packed(tree.flat.gather(1, tree.parents)), num_steps)
        drawn = self.state.choose(passed.logits, rows.of(tree.request), passed.positions, paths, allowed)
        verdict = verify(tree, drawn[tree.flat], num_steps)
        return verdict if self.ranks is None else verdict.broadcast(self.ranks)

    def commit(self, rows: Rows, settings: Settings, tree: DraftTree, passed: Passed, verdict: Verdict) -> StepResult:
        """Moves target KV, known tokens and the method's own state to behind the accepted path."""
        # where there is no token the host ends the request; until then it goes on from a token like any other
        known = replace(verdict, next_token_ids=verdict.next_token_ids.clamp_min(0))
        if settings.topk > 1 and settings.num_steps > 0:
            _move_accepted(self.state, self.kv, rows, known.path)
        self.state.commit(rows, known.next_token_ids, known.accept_lens)
        if self.proposer is not None and settings.num_steps == 0:
            self.proposer.skipped(rows, passed.hidden)
        elif self.proposer is not None:
            self.proposer.accepted(rows, settings, known, passed.hidden)
        logprobs = None
        if Traits.SCORED in rows.traits:
            logprobs = score(passed.logits[known.flat.flatten()], known.next_token_ids.flatten())
        return StepResult(
            next_token_ids=verdict.next_token_ids.flatten().to(torch.int32),
            accept_lens=known.accept_lens.to(torch.int32),
            draft_lens=(tree.real.sum(dim=1) - 1).to(torch.int32),
            num_draft_tokens=known.next_token_ids.shape[1],
            logprobs=logprobs,
        )


def _move_accepted(state: RequestState, kv: KVCache, rows: Rows, path: torch.Tensor) -> None:
    """KV of the accepted node of depth d moves to row seq_len + d; a chain would have nothing to move.

    Everything is read before anything is written, and rows past accept_lens read and write the root's row.
    """
    base = state.seq_lens[rows.index].unsqueeze(1)
    depth = torch.arange(path.shape[1], device=rows.device).expand_as(path)
    source = state.slots(rows.index, base + path).flatten()
    goal = state.slots(rows.index, base + torch.where(path > 0, depth, 0)).flatten()
    for pool in (kv.k, kv.v):
        pool[:, goal] = pool[:, source]
