"""One request as the scheduler follows it, from submission to its end."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from pilotfish_engine.messages import Output, SamplingParams, TokenLogprob
from pilotfish_engine.scheduler.stops import End, StopChecker
from pilotfish_engine.types import CompiledGrammar


@dataclass
class Seat:
    """What a request has while it runs. found_pages: those of `pages` that the prefix cache held. computed_len: KV rows
    done by the target: len(token_ids) − 1 while decoding, less while chunks go through. decoding: all known tokens but
    the last have KV, and a step may follow. spoiled: its KV may be wrong.

    Invariant: pages cover every row that a step may write, and the request holds one reference of each.
    """

    row: int = -1
    pages: list[int] = field(default_factory=list)
    found_pages: int = 0
    computed_len: int = 0
    decoding: bool = False
    spoiled: bool = False


@dataclass
class Counts:
    """Of a request so far. cached_tokens: of the prompt, that the prefix cache held at first admission."""

    admissions: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(eq=False)
class Request:
    """place: (priority, number of arrival), lower ones first, as long as it lives. prompt_logprobs: from the second
    token on. written: its row, as another engine wrote it: still to be read, into pages of its own."""

    request_id: str
    place: tuple[int, int]
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    stops: StopChecker
    grammar: Future[CompiledGrammar] | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    written: bytes | None = None
    seat: Seat = field(default_factory=Seat)
    counts: Counts = field(default_factory=Counts)
    end: End | None = None

    @property
    def running(self) -> bool:
        return self.seat.row >= 0

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of the prompt are still to be scored. There may be KV of them already."""
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_len - 1

    def output(self, token_ids: list[int], logprobs: list[TokenLogprob] | None = None) -> Output:
        """What has come of it: the new tokens, its end if it came, and its counts so far."""
        end = self.end
        first = self.params.prompt_logprobs and 0 < len(token_ids) == len(self.token_ids) - self.prompt_len
        return Output(
            request_id=self.request_id,
            token_ids=token_ids,
            finish_reason=None if end is None else end.reason,
            text_end=None if end is None else end.text_end,
            error=None if end is None else end.error,
            field=None if end is None else end.field,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs if first else None,
            cached_tokens=self.counts.cached_tokens,
            drafted_tokens=self.counts.drafted_tokens,
            accepted_tokens=self.counts.accepted_tokens,
        )
