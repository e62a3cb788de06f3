"""Several prediction heads in a row: head j drafts the token at depth j + 1 (DeepSeek-V3, arXiv 2412.19437, section
2.2). Chains only, as many steps as there are heads.

Head j reads, at row i, head j − 1's output of row i (the target's hidden state before head 0) and token i + j + 1; each
head has a KV layer of its own. With tokens up to S known, its rows up to S − 1 − j are final. So head j stands j rows
behind the target, and to know one token more costs one row of every head. `_carry` keeps what joins two passes: head
j's output of its last final row, which head j + 1 reads next.

A draft begins at head 0's last final row. Head j then reads the j rows that only drafted tokens complete, S − j … S −
1; their KV stands in place and is written anew before anything final reads it. No row at or past S is ever written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pilotfish_engine.batch.passes import over_spans
from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.speculation.proposer import TargetHidden
from pilotfish_engine.speculation.tree import Candidates
from pilotfish_engine.speculation.unread import Unread
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.types import Chunk


class Head(Protocol):
    def forward(self, hidden: Tensor, inputs: ForwardInputs, kv: KVCache, index: int) -> Tensor:
        """Runs one head of the row. hidden [N, H] of rows inputs.positions beside inputs.token_ids → [N, H], which
        the target's LM head and the next head read. index: of the head's layer in `kv`."""
        ...


class MultiLayerProposer:
    aux_layers: tuple[int, ...] = ()

    def __init__(self, heads: Sequence[Head], kv: KVCache, target: Decoder, state: RequestState) -> None:
        """kv: a layer for each head, in the pages of the target's pool."""
        hidden = target.shape.hidden_size
        self.lookahead = len(heads)
        self.kv = kv
        self._heads = heads
        self._target = target
        self._state = state
        self._unread = Unread(state, hidden, target.dtype)
        # rows before it came from the prefix cache, final in every head: the prompt has `lookahead` more tokens
        self._first = state.kept.new_numbers("first own row")
        self._carry = state.kept.new("carried", (len(heads), hidden), target.dtype)

    def slots_needed(self, settings: Settings) -> int:
        return 0

    def admit(self, row: int, cached_len: int) -> None:
        self._unread.admit(row)
        self._first[row] = cached_len

    def reusable_len(self, row: int, seq_len: int) -> int:
        return max(0, seq_len - self._unread.lag(row) - (len(self._heads) - 1))

    def extend(self, chunks: Sequence[Chunk], target: TargetHidden) -> None:
        """Head j reads rows start − j … end − 1 − j of a chunk: those that the token after the chunk completes."""
        hidden = list(torch.split(target.hidden, [chunk.end - chunk.start for chunk in chunks]))
        for number in range(len(self._heads)):
            spans = [self._span(chunk, number) for chunk in chunks]
            if number > 0:
                joined = [self._joined(chunk, number, out) for chunk, out in zip(chunks, hidden, strict=True)]
                for chunk, out in zip(chunks, hidden, strict=True):
                    if out.shape[0] > 0:
                        self._carry[chunk.row, number - 1] = out[-1]
                hidden = [rows[: end - begin] for rows, (begin, end) in zip(joined, spans, strict=True)]
            hidden = self._read_spans(number, chunks, spans, hidden)
        for chunk, out in zip(chunks, hidden, strict=True):
            if out.shape[0] > 0:
                self._carry[chunk.row, -1] = out[-1]

    def due(self, rows: Rows, settings: Settings) -> list[int] | None:
        return self._unread.due(rows, settings.num_steps)

    def catch_up(self, rows: Rows, counts: Tensor, width: int) -> None:
        self._advance(rows, counts, self._unread.features(rows, counts, width))

    def propose(self, rows: Rows, settings: Settings) -> Candidates:
        known = self._state.seq_lens[rows.index]
        last = self._carry[rows.index, 0]
        read = last.unsqueeze(1)  # [B, n, H]: what the next head reads
        ids: list[Tensor] = []
        scores: list[Tensor] = []
        for number in range(settings.num_steps):
            if number > 0:
                out = self._read_rows(number, rows, known - number, torch.stack(ids, dim=1), read)
                read = torch.cat([self._carry[rows.index, number].unsqueeze(1), out], dim=1)
                last = out[:, -1].contiguous()
            logits, to_come = self._target.logits(last), known + 1 + number
            score, token = (x.squeeze(1) for x in self._state.best_drafts(logits, rows, to_come, 1))
            ids.append(token)
            scores.append(score + scores[-1] if scores else score)
        parents = torch.arange(-1, settings.num_steps - 1, device=rows.device).expand(len(rows), -1)
        return Candidates(torch.stack(ids, dim=1), parents, torch.stack(scores, dim=1))

    def accepted(self, rows: Rows, settings: Settings, verdict: Verdict, target: TargetHidden) -> None:
        self._advance(rows, verdict.accept_lens, target.hidden[verdict.flat])

    def skipped(self, rows: Rows, target: TargetHidden) -> None:
        self._unread.keep(rows, target.hidden)

    def _advance(self, rows: Rows, counts: Tensor, hidden: Tensor) -> None:
        """The heads read the last counts[i] ≤ W committed tokens of each row (int64 [B]), 0 leaving it as it is.
        hidden: [B, W, H], the target's at the positions before these tokens."""
        width = hidden.shape[1]
        start = self._state.seq_lens[rows.index] - counts
        column = torch.arange(width, device=rows.device)
        token_ids = self._state.tokens[rows.index.unsqueeze(1), start.unsqueeze(1) + 1 + column]
        is_real = column < counts.unsqueeze(1)
        last = (counts - 1).clamp_min(0).view(-1, 1, 1).expand(-1, 1, hidden.shape[2])
        for number in range(len(self._heads)):
            out = self._read_rows(number, rows, start - number, token_ids, hidden, is_real)
            carried = self._carry[rows.index, number]
            self._carry[rows.index, number] = torch.where(is_real[:, :1], out.gather(1, last).squeeze(1), carried)
            hidden = torch.cat([carried.unsqueeze(1), out[:, :-1]], dim=1)

    def _read_rows(
        self,
        number: int,
        rows: Rows,
        start: Tensor,
        token_ids: Tensor,
        hidden: Tensor,
        is_real: Tensor | None = None,
    ) -> Tensor:
        """Head `number` over KV rows start[i] … start[i] + W − 1 of each row. token_ids, is_real: [B, W]; hidden and
        the result: [B, W, H]. Rows below 0 go to the scratch page."""
        batch, width = token_ids.shape
        at = start.unsqueeze(1) + torch.arange(width, device=rows.device)
        written = at >= 0
        if is_real is not None:
            written = written & is_real
        at = torch.where(written, at, 0)
        prefix = start.clamp_min(0)
        # not causal by number: where start is below 0, token n is of row start + n all the same; and padding sees none
        # of the rows past the last real one, which were never written
        mask = torch.where(written, (2 << (at - prefix.unsqueeze(1)).clamp_min(0)) - 1, 0)
        inputs = ForwardInputs(
            token_ids=token_ids.flatten(),
            positions=at.flatten(),
            slots=torch.where(written, self._state.slots(rows.index, at), 0).flatten(),
            attention=AttentionInputs(
                page_table=self._state.page_table[rows.index],
                prefix_lens=prefix.to(torch.int32),
                q_indptr=torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device=rows.device),
                tree_mask=mask.flatten(),
            ),
        )
        return self._heads[number].forward(hidden.flatten(0, 1), inputs, self.kv, number).view(batch, width, -1)

    # --- prompt chunks: ragged, and known to the host

    def _span(self, chunk: Chunk, number: int) -> tuple[int, int]:
        """The KV rows that head `number` reads of a chunk."""
        begin = max(chunk.start - number, self._first[chunk.row])
        return begin, max(begin, chunk.end - number)

    def _joined(self, chunk: Chunk, number: int, out: Tensor) -> Tensor:
        """[n, H], what head `number` reads: the output of the head before from its carried row on."""
        if chunk.start - number < self._first[chunk.row]:
            return out
        return torch.cat([self._carry[chunk.row, number - 1].unsqueeze(0), out])

    def _read_spans(
        self, number: int, chunks: Sequence[Chunk], spans: Sequence[tuple[int, int]], hidden: Sequence[Tensor]
    ) -> list[Tensor]:
        """Head `number` over the rows of each chunk's span; hidden and result: [n, H] for each chunk, n = 0 allowed."""
        filled = [i for i, (begin, end) in enumerate(spans) if end > begin]
        if not filled:
            return list(hidden)
        begins, ends = [spans[i][0] for i in filled], [spans[i][1] for i in filled]
        inputs = over_spans(
            self._state, self._state.rows([chunks[i].row for i in filled]), begins, ends, shift=number + 1
        )
        out = self._heads[number].forward(torch.cat([hidden[i] for i in filled]), inputs, self.kv, number)
        results = list(hidden)
        for i, part in zip(filled, torch.split(out, [e - b for b, e in zip(begins, ends, strict=True)]), strict=True):
            results[i] = part
        return results
