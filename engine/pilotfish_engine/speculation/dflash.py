"""DFlash drafts: one pass over a block of masks predicts every drafted token of a step (format and forward:
model/dflash.py).

A context row of the draft's KV depends on the target's hidden states of that row alone, so it is right once the
target's row is. The rows from seq_len on hold a block while it is predicted, and are written as context afterwards.

The tree is one of independent positions: a block gives each depth one distribution, whatever is chosen above it, so a
path's probability is the product of its tokens'.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from pilotfish_engine.batch.passes import over_spans, padded_rows
from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.methods import Limit, Limits
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.errors import CheckpointError, MethodError
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model import dflash as model
from pilotfish_engine.model.inputs import ForwardInputs
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsFolder
from pilotfish_engine.speculation.growth import Frontier, grow
from pilotfish_engine.speculation.proposer import Models, ProposerContext, TargetHidden
from pilotfish_engine.speculation.tree import Candidates
from pilotfish_engine.speculation.unread import Unread
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.speculation.vocabulary import Vocabulary
from pilotfish_engine.types import Chunk


class DFlashProposer:
    lookahead = 0

    def __init__(
        self, draft: model.DFlashDraft, shape: model.DFlashShape, state: RequestState, num_pages: int, page_size: int
    ) -> None:
        self.aux_layers = shape.aux_layers
        every = torch.arange(shape.draft_vocab_size, device=state.device)
        self._vocabulary = Vocabulary(draft.target_ids(every), state.vocab_size)
        self.kv = draft.decoder.new_kv_cache(num_pages, page_size)
        self._draft = draft
        self._mask_token_id = shape.mask_token_id
        self._state = state
        self._unread = Unread(state, draft.feature_size, draft.decoder.dtype)

    def slots_needed(self, settings: Settings) -> int:
        return settings.num_steps + 1

    def admit(self, row: int, cached_len: int) -> None:
        self._unread.admit(row)

    def reusable_len(self, row: int, seq_len: int) -> int:
        return seq_len - self._unread.lag(row)

    def extend(self, chunks: Sequence[Chunk], target: TargetHidden) -> None:
        rows = self._state.rows([chunk.row for chunk in chunks])
        inputs = over_spans(self._state, rows, [c.start for c in chunks], [c.end for c in chunks])
        self._draft.write_context(_features(target), inputs.positions, inputs.slots, self.kv)

    def due(self, rows: Rows, settings: Settings) -> list[int] | None:
        return self._unread.due(rows, settings.num_steps)

    def catch_up(self, rows: Rows, counts: Tensor, width: int) -> None:
        self._write_last(rows, counts, self._unread.features(rows, counts, width))

    def propose(self, rows: Rows, settings: Settings) -> Candidates:
        batch, steps, k = len(rows), settings.num_steps, settings.topk
        vocabulary = self._vocabulary
        logits = vocabulary.known(self.block_logits(rows, steps).flatten(0, 1))
        to_come = self._state.seq_lens[rows.index].unsqueeze(1) + 1 + torch.arange(steps, device=rows.device)
        best = self._state.best_drafts(logits, rows.repeated(steps), to_come.flatten(), k, vocabulary.ids)
        scores, draft_ids = (x.view(batch, steps, k) for x in best)
        ids = vocabulary.ids[draft_ids]

        def run(frontier: Frontier) -> tuple[Tensor, Tensor]:
            at = slice(frontier.depth, frontier.depth + 1)  # the same children for each node
            return ids[:, at].expand(-1, k, k), scores[:, at].expand(-1, k, k)

        return grow(ids[:, 0], scores[:, 0], steps, run)

    def accepted(self, rows: Rows, settings: Settings, verdict: Verdict, target: TargetHidden) -> None:
        self._write_last(rows, verdict.accept_lens, _features(target)[verdict.flat])

    def skipped(self, rows: Rows, target: TargetHidden) -> None:
        self._unread.keep(rows, _features(target))

    def block_logits(self, rows: Rows, num_steps: int) -> Tensor:
        """Of the `num_steps` tokens after each row's last known one, float32 [B, num_steps, draft vocabulary]."""
        state, batch, width = self._state, len(rows), num_steps + 1
        first = state.seq_lens[rows.index]
        at = first.unsqueeze(1) + torch.arange(width, device=rows.device)
        known = state.tokens[rows.index].gather(1, first.unsqueeze(1))
        inputs = ForwardInputs(
            token_ids=torch.cat([known, known.new_full((batch, num_steps), self._mask_token_id)], dim=1).flatten(),
            positions=at.flatten(),
            slots=state.slots(rows.index, at).flatten(),
            attention=AttentionInputs(
                page_table=state.page_table[rows.index],
                prefix_lens=first.to(torch.int32),
                q_indptr=torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device=rows.device),
                tree_mask=known.new_full((batch * width,), (1 << width) - 1),  # each sees the whole block
            ),
        )
        hidden, _ = self._draft.decoder.forward(inputs, self.kv)
        masks = hidden.view(batch, width, -1)[:, 1:].contiguous().flatten(0, 1)
        return self._draft.decoder.logits(masks).view(batch, num_steps, -1)

    def _write_last(self, rows: Rows, counts: Tensor, features: Tensor) -> None:
        """The last counts[i] ≤ D committed positions of each row (int64 [B]) become context; features: [B, D,
        feature_size], of the first counts[i] of them in order, the rest is padding."""
        start = self._state.seq_lens[rows.index] - counts
        _, positions, slots = padded_rows(self._state, rows, start, counts, features.shape[1])
        self._draft.write_context(features.flatten(0, 1), positions.flatten(), slots.flatten(), self.kv)


def _features(target: TargetHidden) -> Tensor:
    return torch.cat(target.aux, dim=1)


def _folder(models: Models) -> SafetensorsFolder:
    draft = models.draft
    assert draft is not None, "the registry has checked that a draft is given"
    if not draft.is_dir():
        raise CheckpointError(f"{draft}: not a DFlash draft; a folder with config.json and *.safetensors would work")
    return SafetensorsFolder(draft)


def recognises(models: Models) -> bool:
    with suppress(CheckpointError):  # nothing of this kind; another method may know it
        return models.draft is not None and model.is_of_family(_folder(models).config)
    return False


def check(models: Models) -> Limits:
    folder, target = _folder(models), models.target_shape
    draft = f"the draft {folder.path.name}"
    if not model.is_of_family(folder.config):
        raise MethodError(f"{draft} does not say that it is DFlash's; a checkpoint with dflash_config would work")
    shape = model.read_shape(folder)
    suited = "a draft that was trained for this target would work"
    models.check_vocabulary(folder.path, shape.layers.vocab_size)
    if shape.layers.hidden_size != target.hidden_size:
        raise MethodError(
            f"{draft} has hidden_size {shape.layers.hidden_size} and the target {models.target.name} "
            f"{target.hidden_size}; {suited}"
        )
    if shape.aux_layers[-1] > target.num_layers:
        raise MethodError(
            f"{draft} reads the target behind layer {shape.aux_layers[-1] - 1}, and {models.target.name} has "
            f"{target.num_layers} layers, 0 to {target.num_layers - 1}; {suited}"
        )
    model.check_files(folder, shape)
    blocks = f"{draft} predicts blocks of {shape.block_size} tokens, the known one included"
    return Limits(
        num_steps=Limit(shape.block_size - 1, blocks),
        topk=Limit(shape.draft_vocab_size, f"{draft} knows {shape.draft_vocab_size} tokens"),
    )


def build(context: ProposerContext) -> DFlashProposer:
    folder, state = _folder(context.models), context.state
    shape = model.read_shape(folder)
    draft = model.load(folder, shape, context.target, max_positions=state.length)
    return DFlashProposer(draft, shape, state, context.num_pages, context.page_size)
