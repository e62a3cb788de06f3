"""Rule 6: penalties, bias, min_tokens and grammar at every depth see the tokens before it: answers are those of
decoding one token at a time, written here with dictionaries over the reference library's logits."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.messages import Grammar
from pilotfish_engine.sampling.draw import SamplingRows, choose
from pilotfish_engine.sampling.grammar import Grammars
from pilotfish_engine.scheduler.scheduler import Scheduler
from tests.engine.conformance.conftest import EOS, VOCAB, prompts, settings_of
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed
from tests.engine.conformance.test_capturable import HOST_COPIES, Capturable, refuse

SETTINGS = settings_of([(NUM_STEPS, 1), (NUM_STEPS, 4)])
LENGTH = 18
PIECES = (b"", b"", *(bytes([byte]) for byte in range(32, 32 + VOCAB - 2)))
DIGITS, LETTERS = "0123456789", "ABCDEFGHIJKLM"


def number(letter: str) -> int:
    return ord(letter) - 30


GRAMMARS = Grammars(PIECES, frozenset([EOS]), VOCAB, lambda text: [number(letter) for letter in text])
TEXT = [chr(byte) for byte in range(32, 32 + VOCAB - 2)]

# grammars as automata written out: state → (letters, next state) …; states of which an answer may end
PAIRS = Grammar("regex", "([A-M][A-M]-)*[0-9]+!?")
LONE_DIGITS = Grammar("ebnf", "root ::= ([^0-9] | [0-9] [^0-9])* [0-9]?")
AUTOMATA: dict[Grammar, tuple[list[list[tuple[str, int]]], set[int]]] = {
    PAIRS: ([[(LETTERS, 1), (DIGITS, 3)], [(LETTERS, 2)], [("-", 0)], [(DIGITS, 3), ("!", 4)], []], {3, 4}),
    LONE_DIGITS: (
        [
            [("".join(t for t in TEXT if t not in DIGITS), 0), (DIGITS, 1)],
            [("".join(t for t in TEXT if t not in DIGITS), 0)],
        ],
        {0, 1},
    ),
}

MEMBERS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6},
    {"presence_penalty": 2.0, "frequency_penalty": 0.7, "ignore_eos": True},
    {"logit_bias": ((EOS, 60.0), (20, 3.0), (7, -100.0)), "min_tokens": 9},
    {},
    {"repetition_penalty": 0.8, "frequency_penalty": 1.5, "min_tokens": 4, "stop_token_ids": tuple(range(40, 60))},
    {"grammar": PAIRS, "frequency_penalty": 1.0},
    {"grammar": LONE_DIGITS, "min_tokens": 30},
    {"grammar": PAIRS, "logit_bias": tuple((t, 40.0) for t in (EOS, number("!"))), "min_tokens": 5, "ignore_eos": True},
    {"grammar": LONE_DIGITS, "repetition_penalty": 1.3, "stop_token_ids": (number("C"), number("+"))},
]
BATCH = prompts(len(MEMBERS), seed=51)


def allowed(grammar: Grammar, answer: list[int], ignore_eos: bool) -> set[int]:
    arcs, final = AUTOMATA[grammar]
    state = 0
    for token in answer:
        state = next(after for letters, after in arcs[state] if chr(token + 30) in letters)
    found = {number(letter) for letters, _ in arcs[state] for letter in letters}
    return found | {EOS} if state in final and not (found and ignore_eos) else found


def processed(logits: torch.Tensor, prompt: list[int], answer: list[int], params: dict[str, Any]) -> torch.Tensor:
    out = logits.clone()
    for token, added in params.get("logit_bias", ()):
        out[token] += added
    counts = Counter(answer)
    for token in {*prompt, *answer}:
        factor = params.get("repetition_penalty", 1.0)
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token, count in counts.items():
        out[token] -= params.get("frequency_penalty", 0.0) * count + params.get("presence_penalty", 0.0)
    grammar, ignore_eos = params.get("grammar"), params.get("ignore_eos", False)
    possible = set(range(VOCAB)) if grammar is None else allowed(grammar, answer, ignore_eos)
    if len(answer) < params.get("min_tokens", 0):
        ends = set() if ignore_eos and grammar is None else {EOS}
        possible = possible - ends - set(params.get("stop_token_ids", ())) or possible
    out[[token for token in range(VOCAB) if token not in possible]] = -torch.inf
    return out


def draw(logits: torch.Tensor, sampling: dict[str, Any], position: int) -> int:
    """By the engine's own draw, whose distribution other tests prove."""
    if not sampling:
        return int(logits.argmax())
    temperature, top_p, seed = (torch.tensor([sampling[name]]) for name in ("temperature", "top_p", "seed"))
    rows = SamplingRows(temperature, torch.tensor([VOCAB]), top_p, torch.zeros(1), seed, filtered=True)
    return int(choose(logits.unsqueeze(0), torch.tensor([position]), rows))


def sampling_of(member: int, greedy: bool) -> dict[str, Any]:
    return {} if greedy else {"temperature": 0.7 + 0.1 * (member % 4), "top_p": 0.95, "seed": 1000 + member}


@pytest.fixture(scope="module")
def plain(reference):
    """(tokens, finish_reason) of a member, one token at a time by whole recomputation."""

    @cache
    def answer(member: int, greedy: bool) -> tuple[list[int], str]:
        prompt, params = BATCH[member], MEMBERS[member]
        sampling = sampling_of(member, greedy)
        endless = params.get("ignore_eos", False) and "grammar" not in params
        ends = set(params.get("stop_token_ids", ())) | (set() if endless else {EOS})
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            with torch.inference_mode():
                logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            logits = processed(logits, prompt, tokens, params)
            tokens.append(draw(logits, sampling, len(prompt) + len(tokens)))
            if tokens[-1] in ends:
                return tokens, "stop"
        return tokens, "length"

    return answer


def start(engine, method, draft, num_steps, topk, chunk_size=512, overlap=False):
    harness = Harness(engine(method, draft, 16), chunk_size, overlap)
    harness.scheduler = Scheduler(harness.worker, chunk_size, None, overlap, grammars=GRAMMARS.compile)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    return harness


def submit(harness, member, greedy):
    sampling = {"temperature": 0.0} if greedy else sampling_of(member, greedy)
    return harness.submit(BATCH[member], max_tokens=LENGTH, **MEMBERS[member], **sampling)


def test_the_members_answers_are_worth_comparing(plain):
    """Each parameter changes its member's answer, some end early, some at the first place where they may."""
    answers = [plain(member, True) for member in range(len(MEMBERS))]
    assert {reason for _, reason in answers} == {"stop", "length"}
    assert len(answers[2][0]) == 10
    assert len(answers[7][0]) >= 6


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), SETTINGS)
def test_answers_are_those_of_plain_decoding(engine, plain, method, draft, num_steps, topk, greedy):
    """More members than rows; with chunks, overlap and retractions in half of the cases."""
    harness = start(engine, method, draft, num_steps, topk, 7 if greedy else 512, overlap=greedy == (topk == 1))
    ids = [submit(harness, member, greedy) for member in range(len(MEMBERS))]
    for count in range(60):
        harness.step()
        # setting the envelope commits the step under way: what runs after it can be retracted
        if topk > 1 and count % 9 == 8 and harness.scheduler.set_envelope(fixed(num_steps, topk)).running:
            harness.scheduler.retract_latest()
    harness.drain()
    for member, request_id in enumerate(ids):
        answer = harness.answers[request_id]
        assert (answer.token_ids, answer.finish_reason) == plain(member, greedy), MEMBERS[member]
    if draft == "equal":
        assert sum(answer.last.accepted_tokens for answer in harness.answers.values()) > len(MEMBERS)


@pytest.mark.parametrize("member", [2, 4, 6, 7])
def test_switching_to_plain_and_back_between_steps(engine, plain, member):
    method, draft, num_steps, topk = SETTINGS[-1]
    harness = start(engine, method, draft, num_steps, topk)
    request_id = submit(harness, member, True)
    for count in range(8):
        harness.scheduler.set_envelope(fixed(0, 1) if count % 3 == 0 else fixed(num_steps, topk))
        harness.step()
    harness.drain()
    assert harness.answers[request_id].token_ids == plain(member, True)[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_cannot_be_used_ends_its_own_request_alone(engine, plain, overlap):
    method, draft, num_steps, topk = SETTINGS[-1]
    harness = start(engine, method, draft, num_steps, topk, overlap=overlap)
    good = submit(harness, 5, True)
    wrong = harness.submit([0, 0, 0, 5, 6], grammar=Grammar("regex", "A(("))
    stuck = harness.submit([0, 0, 0, 5, 6], grammar=Grammar("regex", "A(a|Bb)"))  # no token has an a or a b
    aborted = harness.submit([0, 0, 0, 5, 6], grammar=Grammar("regex", "[0-9]{7}"))
    harness.scheduler.abort(aborted)
    outputs = []
    while harness.scheduler.has_work:
        outputs += harness.scheduler.step()
        harness.scheduler.check()
    last = {output.request_id: output for output in outputs}
    assert [token for output in outputs if output.request_id == good for token in output.token_ids] == plain(5, True)[0]
    assert last[wrong].finish_reason == last[stuck].finish_reason == "error"
    assert last[wrong].field == "grammar"
    assert "unclosed group" in last[wrong].error
    assert "grammar" in last[stuck].error
    assert aborted not in last
    assert harness.scheduler.unready is None


@pytest.mark.parametrize("overlap", [False, True])
def test_an_invalid_grammar_costs_nobody_a_step(engine, plain, overlap):
    method, draft, num_steps, topk = SETTINGS[-1]
    invalid = [Grammar("regex", "A(("), Grammar("regex", "[^\\s\\S]"), Grammar("json_schema", '{"type": "strnig"}')]
    steps = []
    for grammars in ([], invalid):
        harness = start(engine, method, draft, num_steps, topk, overlap=overlap)
        good = submit(harness, 5, True)
        wrong = [harness.submit([0, 0, 0, 5, 6], grammar=grammar) for grammar in grammars]
        harness.faulty.update(wrong)
        harness.drain()
        assert harness.answers[good].token_ids == plain(5, True)[0]
        assert all(harness.answers[one].finish_reason == "error" for one in wrong)
        steps.append(len(harness.worker.steps))
    assert steps[0] == steps[1]


@pytest.mark.parametrize("params", [{"logit_bias": ((VOCAB, 1.0),)}, {"min_tokens": 1, "stop_token_ids": (VOCAB,)}])
def test_a_token_that_is_none_ends_its_own_request_alone(engine, plain, params):
    method, draft, num_steps, topk = SETTINGS[0]
    harness = start(engine, method, draft, num_steps, topk)
    good = submit(harness, 0, True)
    wrong = harness.submit([0, 0, 0, 5, 6], **params)
    outputs = []
    while harness.scheduler.has_work:
        outputs += harness.scheduler.step()
        harness.scheduler.check()
    last = {output.request_id: output for output in outputs}
    assert last[wrong].finish_reason == "error"
    assert last[wrong].field in params
    assert [token for output in outputs if output.request_id == good for token in output.token_ids] == plain(0, True)[0]


def test_without_a_tokenizer_a_grammar_is_refused(engine):
    method, draft, _, _ = SETTINGS[0]
    harness = Harness(engine(method, draft, 16))
    harness.submit([0, 0, 0, 5], grammar=PAIRS)
    (output,) = harness.scheduler.step()
    assert output.finish_reason == "error"
    assert output.field == "grammar"
    assert not harness.scheduler.has_work


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 4)], "equal", "random"))
def test_a_step_with_all_that_needs_no_host_is_capturable(engine, monkeypatch, method, draft, num_steps, topk):
    harness = start(engine, method, draft, num_steps, topk)
    for member in range(5):
        harness.submit(BATCH[member], **MEMBERS[member] | {"max_tokens": 30, "temperature": 0.8, "logprobs": 5})
    harness.step()
    settings = Settings(num_steps=num_steps, topk=topk, num_draft_tokens=9)
    rows = list(range(5))
    members = harness.parts.step.state.rows(rows)
    for name in HOST_COPIES:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with torch.inference_mode(), Capturable():
        result = harness.parts.step(members, settings)
    monkeypatch.undo()
    assert result.logprobs is not None
