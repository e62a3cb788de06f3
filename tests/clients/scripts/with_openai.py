"""What people do with the openai package."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field
from scenario import MODEL, TOO_LONG, URL, WEATHER, Raises, main, scenario

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello to the world."}]
TOOLS: Any = [{"type": "function", "function": WEATHER}]
STRICT_TOOLS: Any = [{"type": "function", "function": {**WEATHER, "strict": True}}]


class Step(BaseModel):
    number: int = Field(ge=1, le=9)
    kind: Literal["add", "take"]


class Plan(BaseModel):
    title: Literal["short", "long"]
    steps: list[Step] = Field(min_length=1, max_length=2)


class GetWeather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Rome", "Oslo"]


@scenario
def models() -> None:
    names = [model.id for model in client.models.list()]
    assert names == [MODEL], names
    assert client.models.retrieve(MODEL).id == MODEL


@scenario
def chat() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "Be kind."}, *ASK], max_tokens=16, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@scenario
def chat_with_every_common_setting() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
            {"role": "user", "name": "Bo", "content": [{"type": "text", "text": t} for t in ("One", "two")]},
        ],
        max_completion_tokens=8, temperature=0.7, top_p=0.9, frequency_penalty=0.1, presence_penalty=0.1, seed=7,
        stop=["\n\n", "END"], logit_bias={"5": -100}, n=1, user="someone", metadata={"a": "b"}, store=False,
        service_tier="auto", parallel_tool_calls=True, reasoning_effort="low", verbosity="low",
        prompt_cache_key="key", safety_identifier="someone",
    )  # fmt: skip
    assert answer.choices[0].finish_reason in ("stop", "length")


@scenario
def streaming_with_usage() -> None:
    text, usage = "", None
    with client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=16, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        for chunk in chunks:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    assert text
    assert usage is not None
    assert usage.completion_tokens > 0


@scenario
def several_choices_with_log_probabilities() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, n=3, logprobs=True, top_logprobs=2, temperature=1, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


@scenario
def tools_call_result_answer() -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=64, temperature=0
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    messages.append(message)
    for call in message.tool_calls:
        assert call.type == "function"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny."})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=16, temperature=0)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls


@scenario
def tools_left_to_the_model() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is the weather in Rome?"}], tools=TOOLS,
        tool_choice="auto", max_tokens=64, temperature=0,
    )  # fmt: skip
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


@scenario
def a_named_tool_streamed() -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=STRICT_TOOLS, max_tokens=64, temperature=0, stream=True,
        tool_choice={"type": "function", "function": {"name": "get_weather"}}, parallel_tool_calls=False,
    )  # fmt: skip
    arguments = ""
    for chunk in chunks:
        for call in [call for choice in chunk.choices for call in choice.delta.tool_calls or []]:
            arguments += (call.function and call.function.arguments) or ""
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


@scenario
def json_object() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Answer in JSON."}], max_tokens=200, temperature=0,
        response_format={"type": "json_object"},
    )  # fmt: skip
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@scenario
def parse_and_go_on() -> None:
    """The message that parse() returns is appended to the conversation, as OpenAI's guide does."""
    messages: list[Any] = list(ASK)
    first = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Plan, max_tokens=100, temperature=0
    )
    assert isinstance(first.choices[0].message.parsed, Plan)
    messages += [first.choices[0].message, {"role": "user", "content": "Again."}]
    second = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Plan, max_tokens=100, temperature=0
    )
    assert isinstance(second.choices[0].message.parsed, Plan)


@scenario
def parse_tools_and_go_on() -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    messages: list[Any] = list(ASK)
    first = client.chat.completions.parse(
        model=MODEL, messages=messages, tools=[tool], tool_choice="required", max_tokens=64, temperature=0
    )
    calls = first.choices[0].message.tool_calls or []
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, GetWeather)
    messages.append(first.choices[0].message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in calls]
    second = client.chat.completions.parse(model=MODEL, messages=messages, tools=[tool], max_tokens=64, temperature=0)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls


@scenario
def stream_and_go_on() -> None:
    messages: list[Any] = list(ASK)
    with client.chat.completions.stream(
        model=MODEL, messages=messages, response_format=Plan, max_tokens=100, temperature=0,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    assert isinstance(message.parsed, Plan)
    messages += [message, {"role": "user", "content": "Again."}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8).choices


@scenario
def stream_tools_and_go_on() -> None:
    messages: list[Any] = list(ASK)
    with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=[openai.pydantic_function_tool(GetWeather)], tool_choice="required",
        max_tokens=64, temperature=0,
    ) as stream:  # fmt: skip
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in message.tool_calls]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8).choices


@scenario
def answers_as_dictionaries_go_back() -> None:
    first = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, temperature=0)
    messages: list[Any] = [*ASK, first.choices[0].message.model_dump(), {"role": "user", "content": "Again."}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8).choices


@scenario
def raw_answers_and_headers() -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, max_tokens=4, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"]
    assert raw.parse().choices


@scenario
def completions_of_list_prompts() -> None:
    prompts: list[Any] = ["Once upon a time", [100, 200, 300], ["One", "Two", "Three"], [[100, 200], [300, 400, 500]]]
    for prompt, count in zip(prompts, (1, 1, 3, 2), strict=True):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0, logprobs=2)
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert all(choice.logprobs and choice.logprobs.tokens for choice in answer.choices)


@scenario
def completions_streamed_and_echoed() -> None:
    chunks = client.completions.create(
        model=MODEL, prompt=["One", "Two"], max_tokens=4, n=2, stream=True, stream_options={"include_usage": True}
    )
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2, 3}
    answer = client.completions.create(model=MODEL, prompt="One two", max_tokens=1, echo=True, logprobs=1)
    assert answer.choices[0].text.startswith("One two")


@scenario
def responses_of_every_form() -> None:
    whole = client.responses.create(
        model=MODEL, input="Say hello.", instructions="Be kind.", max_output_tokens=16, store=False
    )
    assert whole.output_text
    asked: Any = [{"role": "user", "content": "Hi"}]
    with client.responses.stream(model=MODEL, input=asked, max_output_tokens=16) as events:
        kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    parsed = client.responses.parse(model=MODEL, input="Plan.", text_format=Plan, max_output_tokens=100, temperature=0)
    assert isinstance(parsed.output_parsed, Plan)


@scenario
def responses_with_tools() -> None:
    tools: Any = [{"type": "function", "strict": True, **WEATHER}]
    asked: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    first = client.responses.create(
        model=MODEL, input=asked, tools=tools, tool_choice="required", max_output_tokens=64, temperature=0
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    asked += first.output
    asked += [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."} for call in calls]
    assert client.responses.create(model=MODEL, input=asked, tools=tools, max_output_tokens=16, temperature=0).output


@scenario
def too_long_a_conversation() -> None:
    with Raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TOO_LONG}], max_tokens=4)
    assert caught.error.code == "context_length_exceeded"


@scenario
def unknown_models_and_embeddings() -> None:
    for call in (
        lambda: client.chat.completions.create(model="unknown", messages=ASK),
        lambda: client.models.retrieve("unknown"),
        lambda: client.embeddings.create(model=MODEL, input="text", encoding_format="float"),
    ):
        with Raises(openai.NotFoundError) as caught:
            call()
        assert caught.error.type, caught.error.body


@scenario
async def twenty_at_once_with_retries() -> None:
    """More than the server lets wait: those it sends away come again, as the client does by itself."""
    refused = 0

    async def count(response: Any) -> None:
        nonlocal refused
        refused += response.status_code == 503

    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [count]})
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=20, http_client=http) as several:
        answers = await asyncio.gather(*(
            several.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": f"busy {i}"}], max_tokens=24
            )
            for i in range(20)
        ))  # fmt: skip
    assert len(answers) == 20
    assert refused > 0


@scenario
async def a_stream_that_is_left() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as several:
        async with await several.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=64, stream=True
        ) as chunks:
            async for _ in chunks:
                break
        assert (await several.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4)).choices


if __name__ == "__main__":
    main()
