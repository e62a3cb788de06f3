"""What changes the logits before a token is chosen: bias, penalties, minimum length and grammar, at every node of a
draft tree as after the tokens on its path.

In this order: bias; repetition, frequency and presence penalty; tokens that the grammar rules out; end tokens before
min_tokens. Greedy rows read what comes out of it too. Parameters and counts are tensors by row; what no row of a batch
asks for is not computed. Knows nothing about how a grammar is matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotfish_engine import kernels
from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, SamplingParams
from pilotfish_engine.model.memory import put
from pilotfish_engine.types import Traits

MAX_END_TOKENS = 2 * MAX_STOP_TOKENS  # of a request and of the model together
RULED_OUT = float("-inf")


@dataclass(frozen=True)
class Paths:
    """Where N nodes stand in their trees. token_ids, parents: int64 [N]; a parent is a place among the N, a root is its
    own. longest: the most draft tokens on a path."""

    token_ids: torch.Tensor
    parents: torch.Tensor
    longest: int


class Processors:
    """R rows of V tokens. Counts of tokens, 5 bytes each, are allocated when the first request that has a penalty is
    admitted: between steps, and once."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._rows, self._vocab_size, self._device = rows, vocab_size, device
        self._bias_ids = torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self._bias = torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.float32, device=device)
        self._end_ids = torch.zeros(rows, MAX_END_TOKENS, dtype=torch.int64, device=device)
        self._end_bias = torch.zeros(rows, MAX_END_TOKENS, dtype=torch.float32, device=device)
        self._first_end = torch.zeros(rows, dtype=torch.int64, device=device)  # position where an end token may stand
        self._repetition = torch.ones(rows, dtype=torch.float32, device=device)
        self._frequency = torch.zeros(rows, dtype=torch.float32, device=device)
        self._presence = torch.zeros(rows, dtype=torch.float32, device=device)
        # int32 [R, V + 1] of the answer, the last column taking what is padding; bool [R, V] of the prompt
        self._counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def admit(
        self, row: int, params: SamplingParams, token_ids: Sequence[int], prompt_len: int, end_token_ids: Sequence[int]
    ) -> Traits:
        """Returns what of all this the row asks for. token_ids: all known tokens, the prompt being the first
        prompt_len. Raises RequestError on a token that is none and on more of them than fit."""
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        traits = Traits.BIASED if params.logit_bias else Traits.NONE
        traits |= Traits.BOUNDED if params.min_tokens > 0 else Traits.NONE
        traits |= Traits.PENALISED if penalties != (1, 0, 0) else Traits.NONE
        # neutral where nothing is asked for: another row of the batch may ask
        self._set(row, (self._bias_ids, self._bias), params.logit_bias, "logit_bias")
        ends = [(token, RULED_OUT) for token in end_token_ids] if Traits.BOUNDED in traits else []
        self._set(row, (self._end_ids, self._end_bias), ends, "stop_token_ids")
        self._first_end[row] = prompt_len + params.min_tokens
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        if Traits.PENALISED in traits:
            counts, in_prompt = self._tables()
            answer = torch.tensor(token_ids[prompt_len:], dtype=torch.int64)
            counts[row] = torch.bincount(answer, minlength=self._vocab_size + 1).to(self._device, torch.int32)
            prompt = torch.tensor(token_ids[:prompt_len], dtype=torch.int64)
            in_prompt[row] = (torch.bincount(prompt, minlength=self._vocab_size) > 0).to(self._device)
        return traits

    def apply(
        self,
        logits: torch.Tensor,
        token_rows: torch.Tensor,
        positions: torch.Tensor,
        traits: Traits,
        paths: Paths | None = None,
        allowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 [N, V]; `logits` itself where no row asks for a change.

        token_rows: int64 [N], the row of each node; positions: int64 [N], of the token to come. traits: of all these
        rows; PENALISED needs the paths. paths: None where every
        node is the last token that is known. allowed: int32 [N, ⌈V / 32⌉], a bit for each token, lowest first.
        """
        if Traits.BIASED in traits:
            logits = logits.scatter_add(1, self._bias_ids[token_rows], self._bias[token_rows])
        if Traits.PENALISED in traits:
            logits = self._penalise(logits, token_rows, paths)
        if allowed is not None:
            logits = kernels.rule_out(logits.contiguous(), allowed)
        if Traits.BOUNDED in traits:
            early = (positions < self._first_end[token_rows]).unsqueeze(1)
            ends = torch.where(early, self._end_bias[token_rows], 0.0)
            bounded = logits.scatter_add(1, self._end_ids[token_rows], ends)
            if allowed is not None:  # where the grammar leaves nothing but the end, the end it is
                nothing = (bounded == RULED_OUT).all(dim=1, keepdim=True)
                bounded = torch.where(nothing, logits, bounded)
            logits = bounded
        return logits

    def commit(
        self, rows: torch.Tensor, traits: Traits, next_token_ids: torch.Tensor, accept_lens: torch.Tensor
    ) -> None:
        """Counts each row's committed tokens: the first accept_lens[i] of next_token_ids, int64 [B, D]."""
        if self._counts is None or Traits.PENALISED not in traits:
            return
        real = torch.arange(next_token_ids.shape[1], device=rows.device) < accept_lens.unsqueeze(1)
        tokens = torch.where(real, next_token_ids, self._vocab_size)
        at = (rows.unsqueeze(1) * (self._vocab_size + 1) + tokens).flatten()
        self._counts.view(-1).scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))

    def _penalise(self, logits: torch.Tensor, token_rows: torch.Tensor, paths: Paths | None) -> torch.Tensor:
        all_counts, all_in_prompt = self._tables()
        counts = all_counts[token_rows]
        if paths is not None:
            one = torch.ones_like(token_rows, dtype=torch.int32).unsqueeze(1)
            at = torch.arange(token_rows.shape[0], device=token_rows.device)
            for _ in range(paths.longest):
                parent = paths.parents[at]
                # the root's token is counted already
                token = torch.where(parent == at, self._vocab_size, paths.token_ids[at])
                counts.scatter_add_(1, token.unsqueeze(1), one)
                at = parent
        counts = counts[:, :-1]
        in_answer = counts > 0
        seen = in_answer | all_in_prompt[token_rows]
        repetition = self._repetition[token_rows].unsqueeze(1)
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, scaled, logits)
        logits = logits - self._frequency[token_rows].unsqueeze(1) * counts
        return logits - self._presence[token_rows].unsqueeze(1) * in_answer

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._counts is None or self._in_prompt is None:
            rows, vocab_size, device = self._rows, self._vocab_size, self._device
            self._counts = torch.zeros(rows, vocab_size + 1, dtype=torch.int32, device=device)
            self._in_prompt = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        return self._counts, self._in_prompt

    def _set(
        self, row: int, tables: tuple[torch.Tensor, torch.Tensor], entries: Sequence[tuple[int, float]], field: str
    ) -> None:
        """Unused places add 0 to token 0."""
        ids, values = tables
        width = ids.shape[1]
        if len(entries) > width:
            raise RequestError(f"{field} has {len(entries)} tokens; {width} at most would work", field)
        for token, _ in entries:
            if not 0 <= token < self._vocab_size:
                raise RequestError(f"{field} has the token {token}; 0 to {self._vocab_size - 1} would work", field)
        padding = [(0, 0.0)] * (width - len(entries))
        added_to, added = zip(*entries, *padding, strict=True)
        ids[row] = put(added_to, torch.int64, self._device)
        values[row] = put(added, torch.float32, self._device)
