"""What clients get, through the official client: answers, streams, stop strings, choices, usage; counts that agree."""

from __future__ import annotations

import concurrent.futures
import random
from typing import Any

import httpx
import openai
import pytest

from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load
from tests.engine.server.serving import MODEL, NAME, Engine, wait_until

TEXT = "Numbers 1234, naïve café 🤷‍♀️ and the end."
TOKENIZER = load(resolve(MODEL))


def stream(served: Engine, **fields: Any) -> list[openai.types.Completion]:
    return list(served.openai().completions.create(model=NAME, stream=True, **fields))


def test_a_chat_answers_with_usage(served: Engine) -> None:
    answer = served.openai().chat.completions.create(
        model=NAME, messages=[{"role": "system", "content": "S"}, {"role": "user", "content": TEXT}], max_tokens=400
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert choice.message.content == f"system\nS\nuser\n{TEXT}\nassistant\n"
    prompt = TOKENIZER.encode_chat([{"role": "system", "content": "S"}, {"role": "user", "content": TEXT}])
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens == len([token for token in prompt if token > 2]) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_content_may_come_in_text_parts_and_answers_may_be_sent_back(served: Engine) -> None:
    body = {
        "model": NAME,
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "tool_calls": None},
            {"role": "user", "content": "d", "name": "someone"},
        ],
        "user": "u", "metadata": {"k": "v"}, "logprobs": False, "n": None, "tools": None, "frequency_penalty": 0,
        "response_format": {"type": "text"}, "top_k": -1,
    }  # fmt: skip
    with served.http as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "system\nab\nassistant\nc\nuser\nd\nassistant\n"


def test_a_streamed_chat_says_the_same_in_parts(served: Engine) -> None:
    chunks = list(
        served.openai().chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": TEXT}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas).endswith(f"user\n{TEXT}\nassistant\n")
    assert len([delta for delta in deltas if delta]) > 5
    assert all("\ufffd" not in delta for delta in deltas)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_is_server_sent_events_to_the_letter(served: Engine) -> None:
    body = {"model": NAME, "prompt": "a b", "stream": True}
    with served.http as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = "".join(answer.iter_text()).split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    "prompt", ["one", ["one", "two words"], [9690, 198], [[9690], [198, 33]]], ids=["text", "texts", "tokens", "lists"]
)
def test_every_form_of_a_prompt_with_n(served: Engine, prompt: Any) -> None:
    answer = served.openai().completions.create(model=NAME, prompt=prompt, n=2, max_tokens=50)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = prompt if several else [prompt]
    tokens = [TOKENIZER.encode(text) if isinstance(text, str) else text for text in prompts]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))
    assert [choice.text for choice in answer.choices] == [TOKENIZER.decode(ids) for ids in tokens for _ in range(2)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, tokens))


def test_choices_of_a_stream_keep_apart(served: Engine) -> None:
    chunks = stream(served, prompt=["alpha beta gamma", "1 2 3 4 5"], n=2, max_tokens=50)
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["alpha beta gamma"] * 2 + ["1 2 3 4 5"] * 2


STOPS = ["end.", "1234", " and the", "café", "ï", "🤷‍♀️", "N", ["xyz", "4, na"], ["the end", "and"], "zzz", "end.!"]


@pytest.mark.parametrize("stop", STOPS)
def test_stop_strings_end_an_answer_wherever_tokens_end(served: Engine, stop: str | list[str]) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    found = [at for text in stops if (at := TEXT.find(text)) >= 0]
    expected = TEXT[: min(found)] if found else TEXT
    whole = served.openai().completions.create(model=NAME, prompt=TEXT, stop=stop, max_tokens=100).choices[0]
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    chunks = stream(served, prompt=TEXT, stop=stop, max_tokens=100)
    shown = ""
    for chunk in chunks:
        shown += chunk.choices[0].text
        assert expected.startswith(shown), "text was shown that the stop string takes back"
    assert shown == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_ending_token_is_counted_and_not_shown(served: Engine) -> None:
    tokens = TOKENIZER.encode("a b c d")
    answer = served.openai().completions.create(
        model=NAME, prompt=tokens, max_tokens=50, extra_body={"stop_token_ids": [tokens[2]]}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a b", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("longest", [1, 2, 5, 7])
def test_max_tokens_ends_an_answer(served: Engine, longest: int) -> None:
    answer = served.openai().completions.create(
        model=NAME, prompt="a b c d", max_tokens=longest, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == longest


def test_max_completion_tokens_counts_in_a_chat(served: Engine) -> None:
    answer = served.openai().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_the_context_ends_an_answer(served: Engine) -> None:
    prompt = [33] * 509
    answer = served.openai().completions.create(
        model=NAME, prompt=prompt, max_tokens=100_000, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    last = served.openai().completions.create(model=NAME, prompt=[33] * 511, extra_body={"ignore_eos": True})
    assert last.usage is not None
    assert last.usage.completion_tokens == 1


def test_a_request_that_the_scheduler_refuses_gets_its_sentence(served: Engine) -> None:
    with pytest.raises(openai.InternalServerError, match="can never fit"):
        served.openai().completions.create(model=NAME, prompt=[15, 33])
    with pytest.raises(openai.APIError, match="can never fit"):
        stream(served, prompt=[15, 33])


def test_many_at_once_get_their_own_answers(served: Engine) -> None:
    rng = random.Random(5)
    prompts = [" ".join(rng.choices(["uno", "dos", "tres", "7"], k=rng.randrange(1, 12))) for _ in range(40)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = pool.map(
            lambda p: served.openai().completions.create(model=NAME, prompt=p, max_tokens=100).choices[0].text, prompts
        )
        assert list(answers) == prompts


NAMES = {
    "prompt_tokens": "pilotfish_engine_prompt_tokens_total",
    "completion_tokens": "pilotfish_engine_generated_tokens_total",
    "cached_tokens": "pilotfish_engine_cached_tokens_total",
    "accepted": "pilotfish_engine_accepted_tokens_total",
    "drafted": "pilotfish_engine_drafted_tokens_total",
}


def test_metrics_agree_with_usage_and_with_what_was_sent(served: Engine) -> None:
    def counts() -> dict[str, float]:
        return {key: served.metric(name) for key, name in NAMES.items()}

    before, sums = counts(), dict.fromkeys(NAMES, 0)
    emitted_before = served.metric("pilotfish_engine_emitted_tokens_total")
    for text in ("a", "a b c d e f g", TEXT):
        answer = served.openai().completions.create(model=NAME, prompt=[text, text], n=3, max_tokens=100)
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.completion_tokens_details is not None
        accepted = usage.completion_tokens_details.accepted_prediction_tokens or 0
        rejected = usage.completion_tokens_details.rejected_prediction_tokens or 0
        sums["prompt_tokens"] += usage.prompt_tokens
        sums["completion_tokens"] += usage.completion_tokens
        sums["cached_tokens"] += usage.prompt_tokens_details.cached_tokens or 0
        sums["accepted"] += accepted
        sums["drafted"] += accepted + rejected
        assert usage.completion_tokens == 6 * (len(TOKENIZER.encode(text)) + 1)
    assert {key: value - before[key] for key, value in counts().items()} == sums
    assert served.metric("pilotfish_engine_emitted_tokens_total") - emitted_before == sums["completion_tokens"]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("requests", [1, 9], ids=["running", "waiting too"])
def test_a_client_that_leaves_ends_its_requests(served: Engine, streaming: bool, requests: int) -> None:
    body = {
        "model": NAME,
        "prompt": "on and on",
        "stream": streaming,
        "n": requests,
        "max_tokens": 500,
        "ignore_eos": True,
    }
    aborted = served.metric('pilotfish_engine_requests_total{finish_reason="abort"}')
    with served.http as client:
        if streaming:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                parts = answer.iter_raw()  # kept: when it goes, httpx closes the connection
                next(parts)
                assert served.get("/v1/speculation").json()["running"] > 0
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=0.1)

    def idle() -> bool:
        report = served.get("/v1/speculation").json()
        return bool(report["running"] == report["waiting"] == 0)

    wait_until(idle, 20)
    assert served.metric('pilotfish_engine_requests_total{finish_reason="abort"}') - aborted == requests


def test_tokens_and_text_convert_both_ways(served: Engine) -> None:
    with served.http as client:
        tokens = client.post("/tokenize", json={"model": NAME, "prompt": TEXT}).json()
        assert tokens == {"count": len(TOKENIZER.encode(TEXT)), "max_model_len": 512, "tokens": TOKENIZER.encode(TEXT)}
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": TEXT}
        chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        assert chat["tokens"] == TOKENIZER.encode_chat([{"role": "user", "content": "hi"}])


def test_the_model_is_listed_by_its_name(served: Engine) -> None:
    assert [model.id for model in served.openai().models.list()] == [NAME]
    assert served.openai().models.retrieve(NAME).owned_by == "pilotfish"
    with pytest.raises(openai.NotFoundError, match=f"'{NAME}' is"):
        served.openai().models.retrieve("other")


def test_a_request_keeps_its_id_or_gets_one(served: Engine) -> None:
    with served.http as client:
        body = {"model": NAME, "prompt": "a"}
        answer = client.post("/v1/completions", json=body, headers={"x-request-id": "mine-7"})
        assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine-7", "cmpl-mine-7")
        bad = client.post("/v1/completions", json={}, headers={"x-request-id": "no spaces\tplease"})
        assert len(bad.headers["x-request-id"]) == 32
