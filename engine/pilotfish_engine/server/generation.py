"""One HTTP request's answers: prompts and parameters become messages to the model process, its outputs become text.

Knows the loaded model's limits, and nothing of how an answer is written down for a client.
"""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pilotfish_engine.messages import FinishReason, Grammar, Output, SamplingParams, Submit, Thought, TokenLogprob
from pilotfish_engine.server.bodies import MAX_CHOICES, Generate
from pilotfish_engine.server.failures import ApiError, Invalid
from pilotfish_engine.server.link import CoreGone, Link
from pilotfish_engine.server.logprobs import ScoredToken
from pilotfish_engine.server.metrics import Metrics
from pilotfish_engine.server.parts import ContentReader, Part, Reader
from pilotfish_engine.tokenizer import Detokenizer, Tokenizer, held_back


@dataclass(frozen=True)
class Piece:
    """What one step brought one choice: text that may be shown now, as what it is read, and its new tokens, where they
    are scored.

    prompt: in the first piece, where they are asked for, the scores of the prompt's tokens from the second on.
    finish_reason: in the last. failure: why, where that is `error`."""

    index: int
    text: str
    parts: Sequence[Part]
    finish_reason: FinishReason | None
    tokens: tuple[ScoredToken, ...] = ()
    prompt: Sequence[TokenLogprob] | None = None
    failure: ApiError | None = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    reasoning_tokens: int = 0


class _Choice:
    """The text of one answer so far, and how much of it has been shown. longest: 0 for one of which nothing is wanted
    but its prompt's scores: the model makes one token all the same, and nobody hears of it."""

    def __init__(self, index: int, request: Submit, tokenizer: Tokenizer, longest: int, reader: Reader) -> None:
        self.index = index
        self.request = request
        self.token_count = 0
        self.last: Output | None = None
        self.last_at: float | None = None
        self._reader = reader
        self._starts: list[int] = []  # where the text of each token begins
        self._detokenizer = Detokenizer(tokenizer, within=True, visible=request.params.visible)
        self.unheard = longest == 0
        ends = set(request.params.stop_token_ids)
        self._silent = ends if request.params.ignore_eos else ends | tokenizer.eos_token_ids
        self._text = ""
        self._shown = 0

    @property
    def reasoning_tokens(self) -> int:
        return bisect_left(self._starts, self._reader.reasoned)

    def take(self, output: Output) -> Piece:
        """Never shows a part of a stop string, of a character, or the ending token."""
        self.last = output
        if self.unheard:
            reason: FinishReason | None = "length" if output.finish_reason == "stop" else output.finish_reason
            return Piece(self.index, "", (), reason, prompt=output.prompt_logprobs)
        self.token_count += len(output.token_ids)
        stopped = output.finish_reason == "stop"
        tokens: list[ScoredToken] = []
        for at, token_id in enumerate(output.token_ids):
            self._starts.append(len(self._text))
            if output.logprobs is not None:
                tokens.append(ScoredToken(token_id, len(self._text), output.logprobs[at]))
            if not (stopped and at == len(output.token_ids) - 1 and token_id in self._silent):
                self._text += self._detokenizer.append((token_id,))
        if output.finish_reason is None:
            end = len(self._text) - held_back(self._text, self.request.params.stop)
        else:
            self._text += self._detokenizer.flush()
            end = len(self._text) if output.text_end is None else output.text_end
        shown, self._shown = self._shown, max(end, self._shown)
        text = self._text[shown:end]
        parts = self._reader.feed(text, last=output.finish_reason is not None)
        return Piece(self.index, text, parts, output.finish_reason, tuple(tokens), output.prompt_logprobs)


TOKEN_BYTES = 8
MAX_COPIED_BYTES = 1 << 25  # four million tokens


@dataclass(frozen=True)
class Asked:
    """What one HTTP request wants. params: of each prompt; max_tokens may be 0. n: answers to each. fields: by the
    engine's names of parameters, what the client calls them where that differs."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    n: int = 1
    priority: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)


def check_copies(asked: Asked) -> None:
    """Bounds what a request comes to when each of its choices is written out. Raises Invalid."""
    own = asked.params[0]
    grammar = 0 if own.grammar is None else len(own.grammar.text)
    beside = grammar + sum(map(len, own.stop)) + TOKEN_BYTES * (len(own.logit_bias) + len(own.stop_token_ids))
    size = asked.n * sum(beside + TOKEN_BYTES * len(prompt) for prompt in asked.prompts)
    if size > MAX_COPIED_BYTES:
        choices = asked.n * len(asked.prompts)
        raise Invalid(
            f"n {asked.n} makes {choices} answers with {size} bytes of prompts, grammar, stop strings and bias "
            f"together; {MAX_COPIED_BYTES} at most would work",
            "n",
        )


class Generation:
    """All choices of one HTTP request, submitted at once; choice index = prompt index * n + k. Each is answered as if
    it were alone.

    new_reader: of what an answer's text consists of. Whoever makes one calls `close` in the end: what has not ended by
    then is aborted.
    """

    def __init__(
        self,
        link: Link,
        tokenizer: Tokenizer,
        metrics: Metrics,
        asked: Asked,
        new_reader: Callable[[], Reader] = ContentReader,
    ) -> None:
        self._link = link
        self._metrics = metrics
        self._asked = asked
        self._began = time.perf_counter()
        name = uuid.uuid4().hex
        self._choices = {
            (request := _submit(f"{name}-{i}-{k}", prompt, own, k, asked.priority)).request_id: _Choice(
                i * asked.n + k, request, tokenizer, own.max_tokens, new_reader()
            )
            for i, (prompt, own) in enumerate(zip(asked.prompts, asked.params, strict=True))
            for k in range(asked.n)
        }
        self._unfinished = set(self._choices)
        self._inbox = link.submit(choice.request for choice in self._choices.values())

    @property
    def size(self) -> int:
        return len(self._choices)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Until every choice has its last. Of one that fails, a piece tells it, as soon as another has come to its end.
        When none does, raises the first one's failure: ApiError 500 when the model process cannot finish, Invalid when
        a parameter turns out to be at fault."""
        failed: list[Piece] = []
        served = False
        while self._unfinished:
            output = await self._inbox.get()
            if isinstance(output, CoreGone):
                raise ApiError(500, str(output), code="engine_gone")
            choice = self._choices[output.request_id]
            self._measure(choice, output)
            piece = choice.take(output)
            if output.finish_reason is not None:
                self._unfinished.remove(output.request_id)
                self._metrics.requests.labels(output.finish_reason).inc()
            if output.finish_reason in ("error", "abort"):
                failed.append(replace(piece, finish_reason="error", failure=self._failure(output)))
            else:
                served = served or output.finish_reason is not None
                yield piece
            if served:
                for failure in failed:
                    yield failure
                failed = []
        for failure in failed[:1]:
            assert failure.failure is not None
            raise failure.failure

    def close(self) -> None:
        self._link.let_go(self._choices)
        self._metrics.requests.labels("abort").inc(len(self._unfinished))
        usage = self.usage()
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.cached_tokens.inc(usage.cached_tokens)

    def usage(self) -> Usage:
        """Of all choices so far. A prompt counts once, and as cached what its first choice found in the cache."""
        firsts = [choice.last for choice in self._choices.values() if choice.index % self._asked.n == 0]
        lasts = [choice.last for choice in self._choices.values() if choice.last is not None]
        return Usage(
            prompt_tokens=sum(map(len, self._asked.prompts)),
            cached_tokens=sum(last.cached_tokens for last in firsts if last is not None),
            completion_tokens=sum(choice.token_count for choice in self._choices.values()),
            drafted_tokens=sum(last.drafted_tokens for last in lasts),
            accepted_tokens=sum(last.accepted_tokens for last in lasts),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices.values()),
        )

    def _failure(self, output: Output) -> ApiError:
        if output.field is None:
            return ApiError(500, output.error or "the engine gave this request up", code="engine_error")
        field = self._asked.fields.get(output.field, output.field)
        return Invalid(f"{field}: {output.error}", field)

    def _measure(self, choice: _Choice, output: Output) -> None:
        now, count = time.perf_counter(), 0 if choice.unheard else len(output.token_ids)
        self._metrics.generated_tokens.inc(count)
        if count and choice.last_at is None:
            self._metrics.first_token.observe(now - self._began)
        elif count and choice.last_at is not None:
            for _ in range(count):
                self._metrics.inter_token.observe((now - choice.last_at) / count)
        drafted_before = choice.last.drafted_tokens if choice.last is not None else 0
        if output.drafted_tokens > drafted_before:
            self._metrics.accept_length.observe(count)
        if count:
            choice.last_at = now
        if output.finish_reason is not None:
            self._metrics.end_to_end.observe(now - self._began)


def _submit(request_id: str, prompt: list[int], params: SamplingParams, k: int, priority: int) -> Submit:
    """Choice k of a seeded request has a seed of its own, or all would be the same; the first has the request's. The
    model makes a token at least."""
    params = msgspec.structs.replace(params, max_tokens=max(1, params.max_tokens))
    if params.seed is not None and k:
        seed = (params.seed + k + (1 << 63)) % (1 << 64) - (1 << 63)
        params = msgspec.structs.replace(params, seed=seed)
    return Submit(request_id=request_id, prompt=prompt, params=params, priority=priority)


def sampling_params(
    body: Generate,
    max_tokens: int,
    vocab_size: int,
    grammar: Grammar | None,
    visible: Sequence[int] = (),
    thought: Thought | None = None,
) -> SamplingParams:
    """max_tokens: what the answer can have, asked for or left by the context. visible: special tokens that are read.
    thought: where stop strings end nothing. Raises Invalid."""
    if (body.min_tokens or 0) > max_tokens:
        raise Invalid(
            f"min_tokens is {body.min_tokens}, and the answer has at most {max_tokens} tokens (max_tokens, or what the "
            f"prompt leaves of the context); at most {max_tokens} would work",
            "min_tokens",
        )
    bias = tuple((int(token), added) for token, added in (body.logit_bias or {}).items())
    check_tokens([token for token, _ in bias], vocab_size, "logit_bias")
    check_tokens(body.stop_token_ids or (), vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=body.seed,
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        min_tokens=body.min_tokens or 0,
        grammar=grammar,
        logprobs=body.alternatives,
        prompt_logprobs=body.scores_prompt,
        visible=tuple(visible),
        thought=thought,
    )


def check_prompt(prompt: Sequence[int], context: int, answered: bool, vocab_size: int, field: str) -> None:
    """Raises Invalid when the model cannot take this prompt. Where it is answered, one token more must fit."""
    if not prompt:
        raise Invalid(f"{field} is empty; at least one token would work", field)
    if len(prompt) > context - answered:
        raise too_long(field, f"has {len(prompt)} tokens", context, answered)
    check_tokens(prompt, vocab_size, field)


def check_tokens(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    worst = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if worst is not None:
        raise Invalid(f"{field} has the token id {worst}; ids from 0 to {vocab_size - 1} would work", field)


def too_long(field: str, what: str, context: int, answered: bool) -> Invalid:
    """In words that clients know this error by, when they do not read its code."""
    share = ", one of them for the answer" if answered else ""
    return Invalid(
        f"{field} {what}: the prompt is too long. This model's maximum context length is {context} tokens{share}; at "
        f"most {context - answered} would work",
        field,
        code="context_length_exceeded",
    )


def check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        raise Invalid(
            f"n {n} with {prompts} prompts makes {prompts * n} answers; at most {MAX_CHOICES} would work", "n"
        )
