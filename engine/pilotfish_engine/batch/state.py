"""The running requests as tensors of the largest batch: everything a step reads or writes besides weights and KV.

One row a request, plus a last row for padding. The host's copies come between steps (`admit`, `append_pages`, what a
method prepares); a step makes none, but for the masks of a grammar while it has such a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pilotfish_engine import kernels
from pilotfish_engine.batch.row_table import RowTable
from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.errors import RequestError
from pilotfish_engine.model.memory import put
from pilotfish_engine.sampling.draw import SamplingRows, choose, draft_logits
from pilotfish_engine.sampling.grammar_rows import GrammarRows
from pilotfish_engine.sampling.processors import Paths, Processors
from pilotfish_engine.types import Admission, NewPages, Traits

SCRATCH_PAGE = 0


class RequestState:
    """Tensors over R = max_running_requests + 1 rows; `tokens` and page tables reach `slack` positions past the context
    limit, where a step near the limit may write candidates.

    vocab_size: how many tokens there are, fewer than the model's rows where these are padded. tokens: int64 [R,
    max_model_len + slack], all known tokens of a row. seq_lens: int64 [R], KV rows that are committed; the token at
    seq_lens is known and has no KV yet (the bonus token), except while the prompt goes through. kept: what a method
    keeps of a row (`RowTable.new`), which is written out with it.
    """

    def __init__(
        self,
        max_running_requests: int,
        max_model_len: int,
        page_size: int,
        slack: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        rows = max_running_requests + 1
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.device = device
        self.length = max_model_len + slack
        table = -(-self.length // page_size) + 1
        self.tokens = torch.zeros(rows, self.length, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = torch.full((rows, table), SCRATCH_PAGE, dtype=torch.int32, device=device)
        self.kept = RowTable(rows, device)
        self._sampling = SamplingRows(  # of every row
            temperature=torch.zeros(rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(rows, dtype=torch.int64, device=device),
            top_p=torch.ones(rows, dtype=torch.float32, device=device),
            min_p=torch.zeros(rows, dtype=torch.float32, device=device),
            seeds=torch.zeros(rows, dtype=torch.int64, device=device),
            filtered=True,
        )
        self._traits = [0] * rows  # of each row, so that a batch knows its own without a copy
        self._last: tuple[tuple[int, ...], Tensor] = ((), torch.zeros(0, dtype=torch.int64, device=device))
        self._scored_prompt = [0] * rows  # the length of a prompt whose tokens are to be scored
        self._processors = Processors(rows, vocab_size, device)
        self.grammars = GrammarRows(vocab_size, device)

    @property
    def padding_row(self) -> int:
        """No request's: steps over padding read and write it, and its pages are the scratch page."""
        return self.seq_lens.shape[0] - 1

    def clear_padding(self) -> None:
        self.seq_lens[self.padding_row :].zero_()

    def rows(self, host: Sequence[int]) -> Rows:
        """These rows, on the device for reading: the same tensor as before where the rows are."""
        numbers = tuple(host)
        if self._last[0] != numbers:
            self._last = numbers, put(numbers, torch.int64, self.device)
        return Rows(self._last[1], numbers, self.traits(numbers))

    def traits(self, host: Sequence[int]) -> Traits:
        """What some of these rows ask for."""
        found = 0
        for row in host:
            found |= self._traits[row]
        return Traits(found)

    def admit(self, admission: Admission) -> None:
        """Raises RequestError on parameters that cannot be."""
        row, params = admission.row, admission.params
        self.tokens[row, : len(admission.token_ids)] = put(admission.token_ids, torch.int64, self.device)
        self.seq_lens[row] = admission.cached_len
        self.page_table[row] = SCRATCH_PAGE
        self.append_pages([NewPages(row, 0, admission.pages)])
        self._sampling.temperature[row] = params.temperature
        self._sampling.top_k[row] = params.top_k or self.vocab_size
        self._sampling.top_p[row] = params.top_p
        self._sampling.min_p[row] = params.min_p
        self._sampling.seeds[row] = admission.seed
        self._scored_prompt[row] = admission.prompt_len if params.prompt_logprobs else 0
        traits = self._processors.admit(row, params, admission.token_ids, admission.prompt_len, admission.end_token_ids)
        if admission.grammar is not None:
            answer = admission.token_ids[admission.prompt_len :]
            try:
                matcher = admission.grammar.start(answer, params.stop_token_ids, params.ignore_eos)
            except Exception as error:
                raise RequestError(f"the grammar cannot be followed: {error}", "grammar") from error
            if matcher.error is not None:
                raise RequestError(matcher.error, "grammar")
            self.grammars.admit(row, matcher)
        self._traits[row] = int(traits | _traits(admission))

    def append_pages(self, added: Sequence[NewPages]) -> None:
        """In one write: requests that began together need their next pages together too."""
        width = self.page_table.shape[1]
        places = [new.row * width + new.first + place for new in added for place in range(len(new.pages))]
        if places:
            pages = put([page for new in added for page in new.pages], torch.int32, self.device)
            self.page_table.view(-1)[put(places, torch.int64, self.device)] = pages

    def release(self, row: int) -> None:
        self.seq_lens[row] = 0
        self.grammars.release(row)
        self.page_table[row] = SCRATCH_PAGE

    def slots(self, rows: Tensor, index: Tensor) -> Tensor:
        """int64 [B, n]: pool slots of KV rows `index` int64 [B, n] of `rows` int64 [B]."""
        pages = self.page_table[rows.unsqueeze(1), index // self.page_size].to(torch.int64)
        return pages * self.page_size + index % self.page_size

    def choose(
        self,
        logits: Tensor,
        rows: Rows,
        positions: Tensor,
        paths: Paths | None = None,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """int64 [N]: the token that follows each place of `rows`, or draw.NONE. positions: int64 [N], of the token to
        come. paths, allowed: as Processors.apply takes them."""
        processed = self._processors.apply(logits, rows.index, positions, rows.traits, paths, allowed)
        return choose(processed, positions, self._sampled(rows))

    def best_drafts(
        self, logits: Tensor, rows: Rows, positions: Tensor, k: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A draft's k best tokens for `positions` int64 [N] of N rows, by its logits [N, V]: log-probabilities and
        places in its vocabulary, best first, [N, k] each. token_ids: as draw.draft_logits takes it."""
        picked_by = draft_logits(logits, positions, self._sampled(rows), token_ids)
        return kernels.top_log_probs(picked_by.contiguous(), k)

    def _sampled(self, rows: Rows) -> SamplingRows | None:
        """None: all are greedy."""
        if Traits.SAMPLED not in rows.traits:
            return None
        every = self._sampling
        return SamplingRows(
            temperature=every.temperature[rows.index],
            top_k=every.top_k[rows.index],
            top_p=every.top_p[rows.index],
            min_p=every.min_p[rows.index],
            seeds=every.seeds[rows.index],
            filtered=Traits.FILTERED in rows.traits,
        )

    def scored_prompt_rows(self, row: int, start: int, end: int) -> int:
        """Counts the KV rows start … end − 1 that a prompt token to be scored follows: the first ones."""
        return max(0, min(end, self._scored_prompt[row] - 1) - start)

    def count(self, rows: Rows, next_token_ids: Tensor, accept_lens: Tensor) -> None:
        """Penalties know of each row's first accept_lens[i] tokens from here on."""
        self._processors.commit(rows.index, rows.traits, next_token_ids, accept_lens)

    def commit(self, rows: Rows, next_token_ids: Tensor, accept_lens: Tensor) -> None:
        """Appends each row's committed tokens. next_token_ids: int64 [B, m], zeros past accept_lens int64 [B]; the
        zeros land behind the known tokens, where nothing reads before it is written again."""
        nodes = next_token_ids.shape[1]
        at = self.seq_lens[rows.index].unsqueeze(1) + 1 + torch.arange(nodes, device=self.device)
        self.tokens[rows.index.unsqueeze(1), at] = next_token_ids
        self.seq_lens[rows.index] += accept_lens
        self.count(rows, next_token_ids, accept_lens)


def _traits(admission: Admission) -> Traits:
    """Beside those that are processors'."""
    params, found = admission.params, Traits.NONE
    if params.temperature > 0:
        found |= Traits.SAMPLED
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            found |= Traits.FILTERED
    if params.logprobs is not None:
        found |= Traits.SCORED
    if admission.grammar is not None:
        found |= Traits.GUIDED
    return found
