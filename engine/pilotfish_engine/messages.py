"""What the HTTP process and the model process say to each other: msgspec structs over one pair of ZeroMQ sockets.

Knows nothing about HTTP, tensors or sockets. Every message is bounded by what the HTTP process let in.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf"]

MAX_LOGIT_BIAS = 300  # tokens
# Between the parts of JSON a model may write a space, or a line break and an indentation: with any white space allowed,
# models that were not trained for JSON write line breaks without end.
SPACES = {"x-guidance": {"whitespace_pattern": r" |\r?\n[ \t]{0,40}"}}
MAX_STOP_TOKENS = 64  # beside the model's own end tokens
MAX_LOGPROBS = 20  # alternatives a token


class Stage(msgspec.Struct, frozen=True):
    """A part of an answer that may be anything, as far as the first of its ends, a text or a special token, or to the
    answer's end. begin: the token that it begins with; where another comes first the part is left out."""

    ends: tuple[str, ...]
    end_tokens: tuple[int, ...] = ()
    begin: int | None = None


class Grammar(msgspec.Struct, frozen=True):
    """What an answer's text must be. `text`: a JSON schema, a regular expression of the whole answer, or a grammar
    (GBNF with ::= and a rule root, else Lark with a rule start); empty for json_object. after: what comes before it,
    and blanks may be between."""

    kind: GrammarKind
    text: str = ""
    after: tuple[Stage, ...] = ()


class Thought(msgspec.Struct, frozen=True):
    """What an answer's text may begin with, between tags of which it has one each: reasoning. opened: by the prompt."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    opened: bool = False


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """How each token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    Penalties are OpenAI's: presence and frequency are taken off the logits of tokens of the answer; repetition divides
    (negative: multiplies) those of prompt and answer, 1 is off. logit_bias: (token, added), 300 at most.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class SamplingParams(Drawing, frozen=True, kw_only=True):
    """How one request is sampled, when it ends, and what is told of its tokens.

    min_tokens: so many tokens come before an end token, and a stop string that is complete by then ends nothing. A
    grammar overrides ignore_eos: where it ends, the answer ends. logprobs: alternatives wanted beside each token's own
    log-probability, 20 at most; None: neither. prompt_logprobs: the same of the prompt's tokens.
    visible: special tokens whose text is part of the answer's, for stop strings and for who reads it. thought: where
    stop strings end nothing.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    visible: tuple[int, ...] = ()
    thought: Thought | None = None


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A tokenised request. The prompt has 1 … max_model_len tokens (checked in the HTTP process). Of those that
    wait, the lowest `priority` is admitted first, and the one that came first among equals."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class AskReport(msgspec.Struct, frozen=True, tag=True):
    call_id: str


class SetEnvelope(msgspec.Struct, frozen=True, tag=True):
    """`update` is the JSON of a contract.EnvelopeUpdate, validated by the HTTP process."""

    call_id: str
    update: bytes


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    call_id: str


ToCore = Submit | Abort | AskReport | SetEnvelope | FlushCache


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of the model's own probabilities, before temperature, filters, penalties, bias and grammar: of
    a token of the answer, and of the likeliest ones at its place, as (token, logprob), best first."""

    logprob: float
    top: list[tuple[int, float]]


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that one step committed to one request, and its end if it came.

    text_end: with a stop string, how many characters of the whole decoded answer are to be returned.
    logprobs: one for each token, where they are asked for. prompt_logprobs: with the first token, one for each of the
    prompt's tokens from the second on. field: with an error that is the client's, the parameter at fault. Counts are
    totals of the request so far.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    text_end: int | None = None
    error: str | None = None
    field: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[Output]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """To AskReport (`body`: JSON of a contract.EngineReport), SetEnvelope (the same) and FlushCache (empty).
    `error`: a sentence for the caller, `field`: what it is about; the call then changed nothing."""

    call_id: str
    body: bytes = b""
    error: str | None = None
    field: str | None = None


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded and warm. The limits are what the HTTP process checks requests against. vocab_size: tokens
    that are the tokenizer's and have a row in the model; None: the tokenizer's. memory_sum: what takes the device's
    memory, in a sentence."""

    max_model_len: int
    max_running_requests: int
    method: str
    vocab_size: int | None = None
    memory_sum: str = ""


class CoreFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be built from this configuration: one sentence for the person who wrote it. The core exits."""

    sentence: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Every second, from the model loop itself. `unready`: why the engine must not be routed to, or None."""

    unready: str | None = None


FromCore = Outputs | Answer | CoreReady | CoreFailed | Heartbeat
