"""One request as the scheduler follows it, from submission to its end."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from pilotfish_engine.messages import FinishReason, Output, SamplingParams, TokenLogprob
from pilotfish_engine.scheduler.stops import StopChecker
from pilotfish_engine.types import CompiledGrammar


@dataclass(eq=False)
class Request:
    """place: (priority, number of arrival), lower ones first, as long as it lives. computed_len: KV rows done by the
    target: len(token_ids) − 1 while decoding, less while chunks go through.

    Invariant: pages cover every row that a step may write, and the request holds one reference of each.
    """

    request_id: str
    place: tuple[int, int]
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    stops: StopChecker
    grammar: Future[CompiledGrammar] | None = None
    row: int = -1
    pages: list[int] = field(default_factory=list)
    found_pages: int = 0  # those of `pages` that the prefix cache held at this admission
    computed_len: int = 0
    decoding: bool = False  # all known tokens but the last have KV, and a step may follow
    cached_tokens: int = 0  # prompt tokens that the prefix cache held at first admission
    admissions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    spoiled: bool = False  # its KV may be wrong
    fault: str | None = None  # the parameter that the error is about
    text_end: int | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on
    written: bytes | None = None  # its row, as another engine wrote it: still to be read, into pages of its own

    @property
    def running(self) -> bool:
        return self.row >= 0

    @property
    def scores_prompt(self) -> bool:
        """Tokens of the prompt are still to be scored, whether or not there is KV of them."""
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_len - 1

    def output(self, token_ids: list[int], logprobs: list[TokenLogprob] | None = None) -> Output:
        """What has come of it: the new tokens, its end if it came, and its counts so far."""
        first = self.params.prompt_logprobs and 0 < len(token_ids) == len(self.token_ids) - self.prompt_len
        return Output(
            request_id=self.request_id,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            text_end=self.text_end,
            error=self.error,
            field=self.fault,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs if first else None,
            cached_tokens=self.cached_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
