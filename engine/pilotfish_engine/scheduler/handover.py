"""Says all of a request, so that another engine goes on with its answer."""

from __future__ import annotations

import msgspec

from pilotfish_engine.messages import Submit, TokenLogprob
from pilotfish_engine.scheduler.request import Counts, Request


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """token_ids: the prompt's and those of the answer that were put out. written: the row, as types.Worker writes it;
    None where no token of the answer is known: the prompt goes through there."""

    submit: Submit
    seed: int
    token_ids: list[int]
    written: bytes | None
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = []


def handover_of(request: Request, written: bytes | None) -> Handover:
    return Handover(
        submit=Submit(
            request_id=request.request_id,
            prompt=request.token_ids[: request.prompt_len],
            params=request.params,
            priority=request.place[0],
        ),
        seed=request.seed,
        token_ids=request.token_ids,
        written=written,
        cached_tokens=request.counts.cached_tokens,
        drafted_tokens=request.counts.drafted_tokens,
        accepted_tokens=request.counts.accepted_tokens,
        prompt_logprobs=request.prompt_logprobs,
    )


def resume(request: Request, handover: Handover) -> None:
    """A request that was just submitted stands where the other engine left it."""
    request.stops.push(handover.token_ids[request.prompt_len :], request.prompt_len)
    request.token_ids, request.seed = list(handover.token_ids), handover.seed
    request.written = handover.written
    request.counts = Counts(1, handover.cached_tokens, handover.drafted_tokens, handover.accepted_tokens)
    request.prompt_logprobs = list(handover.prompt_logprobs)
