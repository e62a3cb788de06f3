"""Each prompt of a list is answered as if it were alone: its room, its seed, its errors; and answers of no tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pilotfish_engine.server import openapi
from tests.engine.server.serving import NAME, Engine
from tests.engine.server.small_core import REFUSED
from tests.engine.server.test_exact_answers import Served, letter_model, rounded

__all__ = ["letter_model"]

PROMPTS = ["abc", "the cat in the hat", [5, 6, 7], "x y z" * 9]


def post(served: Engine, **body: Any) -> Any:
    with served.http as client:
        return client.post("/v1/completions", json={"model": NAME} | body)


def chunks_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    "fields", [{"seed": 5}, {"temperature": 0, "logprobs": 1, "echo": True}, {"max_tokens": 99_999}]
)
def test_each_prompt_of_a_list_is_answered_as_alone(letter_model: Served, fields: dict[str, Any]) -> None:
    served = letter_model.engine
    fields = {"seed": 1, "max_tokens": 20} | fields
    together = post(served, prompt=PROMPTS, **fields).json()
    alone = [post(served, prompt=prompt, **fields).json() for prompt in PROMPTS]
    for index, (one, other) in enumerate(zip(together["choices"], alone, strict=True)):
        assert rounded(one) == rounded(other["choices"][0] | {"index": index})
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][count] == sum(answer["usage"][count] for answer in alone)
    twice = post(served, prompt=PROMPTS[:2], n=2, **fields).json()["choices"]
    assert [twice[0]["text"], twice[2]["text"]] == [choice["text"] for choice in together["choices"][:2]]


def test_a_scored_text_needs_no_answer(letter_model: Served) -> None:
    """What max_tokens 1 says of the prompt, and nothing of an answer; whole, streamed and plain."""
    served = letter_model.engine
    fields = {"prompt": PROMPTS, "echo": True, "logprobs": 2, "n": 2, "temperature": 0}
    scored, more = (post(served, max_tokens=count, **fields).json() for count in (0, 1))
    for choice, longer in zip(scored["choices"], more["choices"], strict=True):
        assert longer["text"].startswith(choice["text"])
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["tokens"]) == len(longer["logprobs"]["tokens"]) - 1
        for kind, values in choice["logprobs"].items():
            assert rounded(values) == rounded(longer["logprobs"][kind][:-1])
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["usage"]["prompt_tokens"] == more["usage"]["prompt_tokens"]
    told = chunks_of(post(served, max_tokens=0, stream=True, **fields).text)
    for choice in scored["choices"]:
        parts = [part for chunk in told for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in (part["logprobs"] or {"tokens": []})["tokens"]] == (
            choice["logprobs"]["tokens"]
        )
    chat = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 0}
    with served.http as client:
        answer = client.post("/v1/chat/completions", json=chat).json()
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == ("", 0)


def test_no_token_is_counted_of_an_answer_that_has_none(served: Engine) -> None:
    before = served.metric("pilotfish_engine_generated_tokens_total")
    answer = post(served, prompt="a b", max_tokens=0).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == 2
    assert served.metric("pilotfish_engine_generated_tokens_total") == before
    assert post(served, prompt="a", max_tokens=0, min_tokens=1).json()["error"]["param"] == "min_tokens"


def test_each_prompt_has_the_room_that_it_leaves(served: Engine) -> None:
    short, long = [33] * 5, [33] * 500
    answer = post(served, prompt=[short, long], max_tokens=100_000, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == (512 - 5) + (512 - 500)


@pytest.mark.parametrize(
    ("prompts", "field", "sentence"),
    [
        ([[33], [33] * 512], "prompt[1]", "has 512 tokens"),
        (["a", "b", "x" * 200_000], "prompt[2]", "characters"),
        (["a", ""], "prompt[1]", "is empty"),
        ([[5], [-5]], "prompt[1]", "token id -5"),
    ],
)
def test_a_prompt_that_cannot_be_is_named_before_any_is_answered(
    served: Engine, prompts: list[Any], field: str, sentence: str
) -> None:
    before = served.metric("pilotfish_engine_requests_total")
    error = post(served, prompt=prompts).json()["error"]
    assert error["param"] == field
    assert sentence in error["message"]
    assert served.metric("pilotfish_engine_requests_total") == before


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_failure_of_one_leaves_the_others_their_answers(served: Engine, place: int) -> None:
    prompts = [[40, 41], [50, 51, 52]]
    prompts.insert(place, [33, REFUSED])
    answer = post(served, prompt=prompts)
    assert answer.status_code == 200
    whole = openapi.Completion.model_validate(answer.json())
    told = chunks_of(post(served, prompt=prompts, stream=True).text)
    for index, prompt in enumerate(prompts):
        choice = whole.choices[index]
        parts = [part for chunk in told for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice.text
        if index == place:
            assert choice.finish_reason == parts[-1]["finish_reason"] == "error"
            assert choice.error is not None
            assert choice.error.model_dump() == parts[-1]["error"]
            assert "can never fit" in choice.error.message
        else:
            alone = post(served, prompt=prompt).json()["choices"][0]
            assert (choice.text, choice.finish_reason, choice.error) == (alone["text"], alone["finish_reason"], None)


def test_when_all_fail_there_is_no_answer(served: Engine) -> None:
    for stream in (False, True):
        answer = post(served, prompt=[[REFUSED], [33, REFUSED]], stream=stream)
        assert answer.status_code == 500
        assert "can never fit" in answer.json()["error"]["message"]
