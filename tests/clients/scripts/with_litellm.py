"""What people do with litellm, as provider `openai` and as provider `hosted_vllm`."""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
from pydantic import BaseModel, ConfigDict
from scenario import MODEL, TOO_LONG, URL, WEATHER, Raises, main, scenario

litellm.telemetry = False
PROVIDERS = ("openai", "hosted_vllm")
ASK = [{"role": "user", "content": "Say hello to the world."}]
TOOLS = [{"type": "function", "function": WEATHER}]


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    sunny: bool


def complete(provider: str, messages: list[Any] = ASK, **fields: Any) -> Any:
    fields = {"max_tokens": 64, "temperature": 0, "num_retries": 0} | fields
    return litellm.completion(f"{provider}/{MODEL}", messages=messages, api_base=URL, api_key="none", **fields)


@scenario
def chat() -> None:
    for provider in PROVIDERS:
        answer = complete(provider, [{"role": "system", "content": "Be kind."}, *ASK], max_tokens=16)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens > 0


@scenario
def streaming_with_usage() -> None:
    for provider in PROVIDERS:
        chunks = list(complete(provider, max_tokens=16, stream=True, stream_options={"include_usage": True}))
        whole = litellm.stream_chunk_builder(chunks, messages=ASK)
        assert whole.choices[0].message.content
        assert whole.usage.total_tokens > 0


@scenario
def reasoning_effort() -> None:
    for provider in PROVIDERS:
        assert complete(provider, reasoning_effort="low", max_tokens=8, allowed_openai_params=["reasoning_effort"])


@scenario
def cache_control_in_messages() -> None:
    marked = {"type": "text", "text": "A long preface.", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": [marked]},
        {"role": "user", "content": "Hello", "cache_control": {"type": "ephemeral"}},
    ]
    for provider in PROVIDERS:
        assert complete(provider, messages, max_tokens=8).choices


@scenario
def tools_call_result_answer() -> None:
    for provider in PROVIDERS:
        messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
        first = complete(provider, messages, tools=TOOLS, tool_choice="required").choices[0].message
        assert json.loads(first.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")
        messages.append(first)
        messages += [{"role": "tool", "tool_call_id": c.id, "name": "get_weather", "content": "Sun."}
                     for c in first.tool_calls]  # fmt: skip
        assert complete(provider, messages, tools=TOOLS, max_tokens=16).choices


@scenario
def tools_streamed() -> None:
    for provider in PROVIDERS:
        chunks = list(complete(provider, tools=TOOLS, tool_choice="required", stream=True))
        call = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message.tool_calls[0]
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


@scenario
def structured_output_and_go_on() -> None:
    for provider in PROVIDERS:
        message = complete(provider, response_format=Weather).choices[0].message
        assert Weather.model_validate_json(message.content)
        messages = [*ASK, message, {"role": "user", "content": "Again."}]
        assert complete(provider, messages, max_tokens=8).choices
        messages[1] = message.model_dump()
        assert complete(provider, messages, max_tokens=8).choices


@scenario
def an_answer_with_reasoning_goes_back() -> None:
    said = {"role": "assistant", "content": "Hi.", "reasoning_content": "They say hello.", "thinking_blocks": None}
    for provider in PROVIDERS:
        assert complete(provider, [*ASK, said, {"role": "user", "content": "Again."}], max_tokens=8).choices


@scenario
def log_probabilities_and_choices() -> None:
    for provider in PROVIDERS:
        answer = complete(provider, n=2, logprobs=True, top_logprobs=2, max_tokens=4, temperature=1, seed=3)
        assert len(answer.choices) == 2
        assert answer.choices[1].logprobs.content


@scenario
def text_completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once upon", api_base=URL, api_key="none", max_tokens=4
    )
    assert answer.choices[0].text


@scenario
async def at_once() -> None:
    answer = await litellm.acompletion(
        f"hosted_vllm/{MODEL}", messages=ASK, api_base=URL, api_key="none", max_tokens=8, stream=True
    )
    assert [chunk async for chunk in answer]


@scenario
def responses() -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="Say hello.", api_base=URL, api_key="none", max_output_tokens=16
    )
    assert answer.output


@scenario
def too_long_a_conversation() -> None:
    for provider in PROVIDERS:
        with Raises(litellm.ContextWindowExceededError):
            complete(provider, [{"role": "user", "content": TOO_LONG}], max_tokens=4)


@scenario
def unknown_models() -> None:
    with Raises(litellm.NotFoundError):
        litellm.completion("openai/unknown", messages=ASK, api_base=URL, api_key="none", num_retries=0)


if __name__ == "__main__":
    main()
