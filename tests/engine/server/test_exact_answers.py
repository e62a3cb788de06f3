"""Every parameter of the API, with speculation and without: the same answers, whole and streamed, alone and among
others; log-probabilities are those of scoring the finished text.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import LlamaForCausalLM

from pilotfish_engine.server.logprobs import token_text
from pilotfish_engine.tokenizer import Tokenizer, load
from tests.engine.server import letters
from tests.engine.server.letters import ADMIN_TOKEN, END
from tests.engine.server.parameters import CHATS, COMPLETIONS, FORM, MAX_TOKENS, MESSAGES, PROMPT
from tests.engine.server.serving import NAME, Engine


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """Token ids by the texts that log-probabilities give them."""
    return {token_text(tokenizer, token): token for token in range(tokenizer.vocab_size)}


@dataclass(frozen=True)
class Served:
    engine: Engine
    model: LlamaForCausalLM
    tokenizer: Tokenizer
    ids: dict[str, int]

    def speculate(self, num_steps: int) -> None:
        answer = httpx.put(
            self.engine.url + "/v1/speculation",
            json={"num_steps": num_steps},
            headers={"authorization": f"Bearer {ADMIN_TOKEN}"},
            verify=False,
        )
        assert answer.status_code == 200, answer.text

    def scores(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """float32 [answer, V]: log-probabilities of what stands at each place of the answer."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, dim=1)


@pytest.fixture(scope="module")
def letter_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("letters")
    model = letters.model(letters.tokenizer().get_vocab_size())
    with letters.serving(folder, model) as engine:
        tokenizer = load(folder / "target")
        yield Served(engine, model, tokenizer, vocabulary(tokenizer))


Answer = dict[str, Any]


def ask(served: Served, name: str, chat: bool, stream: bool) -> Answer:
    """The choices' contents and usage; log-probabilities rounded to what they must agree in."""
    fields = {"max_tokens": MAX_TOKENS} | (CHATS if chat else COMPLETIONS)[name]
    fields = {"messages": MESSAGES} | fields if chat else {"prompt": PROMPT} | fields
    body = {"model": NAME, "stream": stream} | fields
    if stream:
        body["stream_options"] = {"include_usage": True}
    client = served.engine.openai()
    path = "/chat/completions" if chat else "/completions"
    kind: Any = openai.types.chat.ChatCompletion if chat else openai.types.Completion
    if not stream:
        answer = client.post(path, cast_to=kind, body=body)
        return {"choices": [whole(choice) for choice in answer.choices], "usage": answer.usage.to_dict()}
    chunk_kind: Any = openai.types.chat.ChatCompletionChunk if chat else kind
    chunks = list(client.post(path, cast_to=kind, body=body, stream=True, stream_cls=openai.Stream[chunk_kind]))
    size = 1 + max(choice.index for chunk in chunks for choice in chunk.choices)
    choices = [joined([c for chunk in chunks for c in chunk.choices if c.index == index]) for index in range(size)]
    return {"choices": choices, "usage": chunks[-1].usage.to_dict()}


def whole(choice: Any) -> Answer:
    message = getattr(choice, "message", None)
    calls = None if message is None else message.tool_calls
    return {
        "text": choice.text if message is None else message.content or "",
        "calls": [(call.function.name, call.function.arguments) for call in calls or []],
        "finish_reason": choice.finish_reason,
        "logprobs": None if choice.logprobs is None else rounded(choice.logprobs.to_dict()),
    }


def joined(parts: list[Any]) -> Answer:
    """What a client makes of a stream's choice."""
    text, calls, logprobs = "", list[tuple[str, str]](), dict[str, list[Any]]()
    for part in parts:
        delta = getattr(part, "delta", None)
        text += part.text if delta is None else delta.content or ""
        for call in (delta.tool_calls if delta is not None else None) or []:
            if call.id is not None:
                assert (call.index, call.type) == (len(calls), "function")
                calls.append((call.function.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.function.arguments)
        for key, values in (part.logprobs.to_dict() if part.logprobs is not None else {}).items():
            logprobs.setdefault(key, []).extend(values or [])
    reasons = [part.finish_reason for part in parts]
    assert reasons[:-1] == [None] * (len(parts) - 1)
    return {"text": text, "calls": calls, "finish_reason": reasons[-1], "logprobs": rounded(logprobs) or None}


def rounded(value: Any) -> Any:
    """None, [] and absent are one; numbers agree to 1e-4 or so."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items() if part not in (None, [])}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


KINDS = [(True, name) for name in CHATS] + [(False, name) for name in COMPLETIONS]
Answers = dict[tuple[bool, str], Answer]


@pytest.fixture(scope="module")
def plain(letter_model: Served) -> Answers:
    """One after the other, without drafts."""
    letter_model.speculate(0)
    try:
        return {(chat, name): ask(letter_model, name, chat, stream=False) for chat, name in KINDS}
    finally:
        letter_model.speculate(4)


@pytest.fixture(scope="module")
def speculative(letter_model: Served) -> tuple[Answers, Answers]:
    """Whole and streamed, up to six at once."""
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        wholes = pool.map(lambda kind: ask(letter_model, kind[1], kind[0], stream=False), KINDS)
        streams = pool.map(lambda kind: ask(letter_model, kind[1], kind[0], stream=True), KINDS)
        return dict(zip(KINDS, wholes, strict=True)), dict(zip(KINDS, streams, strict=True))


@pytest.mark.parametrize(("chat", "name"), KINDS, ids=[f"{'chat' if c else 'completion'} {n}" for c, n in KINDS])
def test_answers_are_the_same_with_drafts_and_without(plain, speculative, chat, name):
    expected, drafted, streamed = plain[chat, name], speculative[0][chat, name], speculative[1][chat, name]
    assert expected["choices"], name
    assert drafted["choices"] == expected["choices"]
    assert streamed["choices"] == expected["choices"]
    for usage in (drafted["usage"], streamed["usage"]):
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[key] == expected["usage"][key]


def test_drafts_were_accepted_and_refused(speculative):
    details = [answer["usage"]["completion_tokens_details"] for answer in speculative[0].values()]
    accepted = sum(detail["accepted_prediction_tokens"] for detail in details)
    refused = sum(detail["rejected_prediction_tokens"] for detail in details)
    assert accepted > 200
    assert refused > 50


def test_answers_are_what_the_parameters_ask_for(plain):
    def texts(name: str, chat: bool = True) -> list[str]:
        return [choice["text"] for choice in plain[chat, name]["choices"]]

    def reason(name: str) -> str:
        return plain[True, name]["choices"][0]["finish_reason"]

    assert len(set(texts("n"))) == 3
    assert len(set(texts("n greedy"))) == 1
    assert len(texts("best_of", False)) == 2
    assert texts("echo", False)[0].startswith(PROMPT)
    assert len(texts("echo", False)[0]) > len(PROMPT)
    assert [text[:3] for text in texts("prompts", False)] == ["abc", "%&'", "the"]
    assert len(set(texts("logit_bias")[0])) == 2
    assert plain[True, "min_tokens"]["usage"]["completion_tokens"] == 18
    assert plain[True, "ignore_eos"]["usage"]["completion_tokens"] == MAX_TOKENS
    assert not any(stop in texts("stop")[0] for stop in ("xj", " ", "5"))
    assert {reason(name) for name in ("stop", "stop_token_ids", "json_schema", "choice")} == {"stop"}
    assert texts("choice")[0] in ("a.b", "a|b", "the (cat)")
    assert texts("grammar")[0].rstrip(".!") in ("yes", "no")
    assert texts("lark")[0].startswith("é")
    for name in ("json_schema", "json"):
        assert set(json.loads(texts(name)[0])) == {"name", "age"}
    assert '"age"' not in texts("strict")[0]
    for name, names in (("required", {"look_up", "wait"}), ("one call", {"look_up", "wait"}), ("named", {"look_up"})):
        calls = plain[True, name]["choices"][0]["calls"]
        assert calls
        assert {called for called, _ in calls} <= names
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        assert (texts(name)[0], reason(name)) == ("", "tool_calls")
    assert len(plain[True, "one call"]["choices"][0]["calls"]) == 1
    assert reason("cut short") == "length"
    assert plain[True, "none"]["choices"][0]["calls"] == plain[True, "auto"]["choices"][0]["calls"] == []
    # tools that may be called are shown to the model
    assert plain[True, "auto"]["usage"]["prompt_tokens"] > 200 > plain[True, "none"]["usage"]["prompt_tokens"]


# what changes an answer, and not what is said of its tokens
SCORED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.3, "seed": 50, "top_p": 0.8},
    {"frequency_penalty": 1, "repetition_penalty": 1.2, "logit_bias": {"7": 5}, "seed": 51, "top_k": 20},
    {"seed": 52, "stop": ["th", "j", "5"]},
    {"seed": 53, "logit_bias": {"0": 4}, "min_tokens": 5},
    {"seed": 54, "structured_outputs": {"regex": "[a-f]{3}(é|🤷){2}x*"}},
]


@pytest.mark.parametrize("params", SCORED)
def test_log_probabilities_are_those_of_scoring_the_finished_text(letter_model: Served, params: dict[str, Any]) -> None:
    served = letter_model
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "logprobs": 4} | params
    with served.engine.http as client:
        answer = client.post("/v1/completions", json=body).json()
    choice, found = answer["choices"][0], answer["choices"][0]["logprobs"]
    ids = [served.ids[text] for text in found["tokens"]]
    assert len(ids) == answer["usage"]["completion_tokens"]
    scores = served.scores(served.tokenizer.encode(PROMPT), ids)
    own_scores = [float(row[i]) for row, i in zip(scores, ids, strict=True)]
    assert found["token_logprobs"] == pytest.approx(own_scores, abs=1e-4)
    for row, top, own in zip(scores, found["top_logprobs"], found["tokens"], strict=True):
        assert top == pytest.approx({text: float(row[served.ids[text]]) for text in top}, abs=1e-4)
        likeliest = sorted((value for text, value in top.items() if text != own or len(top) == 4), reverse=True)
        assert likeliest == pytest.approx(row.topk(len(likeliest)).values.tolist(), abs=1e-4)
    text = served.tokenizer.decode(ids)
    assert text.startswith(choice["text"])
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    for before, token, offset in zip(["", *found["tokens"]], found["tokens"], offsets, strict=False):
        if "bytes:" not in before + token and token != END:
            assert text[offset : offset + len(token)] == token


def test_an_echo_s_log_probabilities_are_those_of_the_whole_text(letter_model: Served) -> None:
    """Whatever of the prompt the prefix cache holds, and though it goes through the model in several chunks."""
    served = letter_model
    prompt = f"{PROMPT}{END}é🤷 and " + "ab the " * 30
    body = {"model": NAME, "prompt": [PROMPT, prompt], "max_tokens": 3, "echo": True, "logprobs": 3, "temperature": 0}
    for _ in range(2):
        with served.engine.http as client:
            choices = client.post("/v1/completions", json=body).json()["choices"]
        for text, choice in zip((PROMPT, prompt), choices, strict=True):
            found = choice["logprobs"]
            ids = [served.ids[token] for token in found["tokens"]]
            assert choice["text"].startswith(text)
            assert ids[:-3] == served.tokenizer.encode(text)
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            scores = served.scores(ids[:1], ids[1:])
            expected = [float(row[token]) for row, token in zip(scores, ids[1:], strict=True)]
            assert found["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
            for row, top in zip(scores, found["top_logprobs"][1:], strict=True):
                assert top == pytest.approx({name: float(row[served.ids[name]]) for name in top}, abs=1e-4)
                assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
            for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
                assert "bytes:" in token or choice["text"][offset : offset + len(token)] == token


def test_a_prompt_that_fills_the_context_is_scored(letter_model: Served) -> None:
    """A list of prompts, as tokens and as a text, of which nothing is wanted but their scores: the longest leaves no
    room for an answer. With one token wanted it is refused by its place in the list."""
    served = letter_model
    text = "the ab in " * 400
    full = served.tokenizer.encode(text)[: letters.MAX_MODEL_LEN]
    prompts: list[list[int] | str] = [full, PROMPT, full[:-1], served.tokenizer.decode(full)]
    assert served.tokenizer.encode(served.tokenizer.decode(full)) == full
    body = {"model": NAME, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0}
    with served.engine.http as client:
        answer = client.post("/v1/completions", json=body).json()
        refused = client.post("/v1/completions", json=body | {"max_tokens": 1}).json()["error"]
        plain = client.post("/v1/completions", json=body | {"logprobs": None, "echo": False}).json()
    assert [choice["text"] for choice in plain["choices"]] == [""] * 4
    assert (refused["param"], refused["code"]) == ("prompt[0]", "context_length_exceeded")
    total = 3 * len(full) - 1 + len(served.tokenizer.encode(PROMPT))
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, total)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        ids = served.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        scores = served.scores(ids[:1], ids[1:])
        expected = [float(row[token]) for row, token in zip(scores, ids[1:], strict=True)]
        assert choice["logprobs"]["token_logprobs"] == [None, *(pytest.approx(value, abs=1e-4) for value in expected)]
        assert choice["text"] == served.tokenizer.decode(ids)


def test_a_chat_s_log_probabilities_give_the_tokens_bytes(letter_model: Served) -> None:
    """Those of an ending token and of a stop string too, which the text has not."""
    served = letter_model
    endings: list[dict[str, Any]] = [{"logit_bias": {"0": 4}, "seed": 53}, {"stop": ["th", "j", "5"], "seed": 52}]
    for params in endings:
        body = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "logprobs": True, "top_logprobs": 2} | params
        with served.engine.http as client:
            answer = client.post("/v1/chat/completions", json=body).json()
        choice = answer["choices"][0]
        entries = choice["logprobs"]["content"]
        assert choice["finish_reason"] == "stop"
        assert len(entries) == answer["usage"]["completion_tokens"]
        text = b"".join(bytes(entry["bytes"] or []) for entry in entries).decode(errors="replace")
        if "stop" in params:
            assert text[len(choice["message"]["content"]) :].startswith(tuple(params["stop"]))
            assert text.startswith(choice["message"]["content"])
        else:
            assert text == choice["message"]["content"]
            assert (entries[-1]["token"], entries[-1]["bytes"]) == (END, None)
        for entry in entries:
            assert len(entry["top_logprobs"]) == 2
            assert entry["top_logprobs"][0]["logprob"] >= entry["logprob"] - 1e-6


def test_stop_strings_at_every_place_end_text_tokens_and_log_probabilities_together(letter_model: Served) -> None:
    """Greedy answers come in runs of up to five tokens; a stop string begins and ends anywhere in them."""
    served = letter_model
    client = served.engine.openai()
    parts = [token for token in range(1, served.tokenizer.vocab_size) if served.tokenizer.piece(token)[0] > 127]
    bias = {str(token): -100 for token in [0, *parts]}  # every character is one that stays when it is cut off
    asked: dict[str, Any] = {
        "model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 40, "logprobs": 1, "logit_bias": bias
    }  # fmt: skip
    whole_answer = client.completions.create(**asked)
    text = whole_answer.choices[0].text
    assert whole_answer.usage is not None
    assert whole_answer.usage.completion_tokens_details is not None
    assert (whole_answer.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 15
    assert whole_answer.choices[0].logprobs is not None
    tokens = whole_answer.choices[0].logprobs.tokens or []
    ids = [served.ids[token] for token in tokens]

    def check(at: int) -> None:
        stop = text[at : at + 1 + at % 4]
        first = text.find(stop)
        count = next(n for n in range(len(ids) + 1) if stop in served.tokenizer.decode(ids[:n]))
        stopped = client.completions.create(**asked | {"stop": ["never", stop]})
        choice, usage = stopped.choices[0], stopped.usage
        assert (choice.text, choice.finish_reason) == (text[:first], "stop")
        assert usage is not None
        assert usage.completion_tokens == count
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == tokens[:count]
        shown, told = "", list[str]()
        for chunk in client.completions.create(**asked | {"stop": stop, "stream": True}):
            shown += chunk.choices[0].text
            told += (chunk.choices[0].logprobs.tokens or []) if chunk.choices[0].logprobs is not None else []
            assert text[:first].startswith(shown)
        assert (shown, told) == (text[:first], tokens[:count])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(check, range(len(text))))


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": FORM | {"json_schema": {"schema": {"type": "strnig"}}}}, "response_format", "strnig"),
    ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs.json.$ref", "nowhere"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed"),
    ({"structured_outputs": {"regex": "[^\\s\\S]"}}, "structured_outputs", "no answer can begin"),
    ({"structured_outputs": {"grammar": "root ::= nowhere"}}, "structured_outputs", "nowhere"),
    ({"structured_outputs": {"regex": "a" * 140_000}}, "structured_outputs", "131072 at most"),
]  # fmt: skip
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": 7}}}}}


def test_a_grammar_that_cannot_be_compiled_is_named_and_disturbs_nobody(letter_model: Served) -> None:
    served = letter_model
    undisturbed: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "seed": 60, "max_tokens": 120}
    expected = served.engine.openai().completions.create(**undisturbed).choices[0].text
    bad = [(fields | {"messages": MESSAGES}, field, reason) for fields, field, reason in BAD]
    bad.append(({"messages": MESSAGES, "tools": [BAD_TOOL], "tool_choice": "required"}, "tools", "failed to compile"))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(lambda: served.engine.openai().completions.create(**undisturbed)) for _ in range(3)]
        with served.engine.http as client:
            for fields, field, reason in bad:
                for stream in (False, True):
                    answer = client.post("/v1/chat/completions", json={"model": NAME, "stream": stream} | fields)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["param"]) == (400, field), error
                    assert error["message"].startswith((f"{field}: ", f"{field} '"))
                    assert reason in error["message"]
        assert [answer.result().choices[0].text for answer in answers] == [expected] * 3


def test_a_token_past_the_vocabulary_is_refused(letter_model: Served) -> None:
    with letter_model.engine.http as client:
        body = {"model": NAME, "prompt": PROMPT, "logit_bias": {str(letter_model.tokenizer.vocab_size): 1}}
        answer = client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")
