"""What people do with langchain-openai."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field
from scenario import MODEL, TOO_LONG, URL, Raises, main, scenario


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=0, le=9)


@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather of a city."""
    return f"It is sunny in {city}."


def chat(**changes: Any) -> ChatOpenAI:
    fields = {"temperature": 0, "max_tokens": 80, "max_retries": 0} | changes
    return ChatOpenAI(model=MODEL, base_url=URL, api_key="none", **fields)


@scenario
def invoke() -> None:
    answer = chat(max_tokens=16).invoke([SystemMessage("Be kind."), HumanMessage("Say hello.")])
    assert answer.text
    assert answer.usage_metadata["output_tokens"] > 0


@scenario
def stream_with_usage() -> None:
    whole: Any = None
    for chunk in chat(max_tokens=16, stream_usage=True).stream("Say hello."):
        whole = chunk if whole is None else whole + chunk
    assert whole.text
    assert whole.usage_metadata["output_tokens"] > 0


@scenario
def batch() -> None:
    assert len(chat(max_tokens=8).batch(["One", "Two", "Three"])) == 3


@scenario
async def async_stream() -> None:
    assert [chunk async for chunk in chat(max_tokens=8).astream("Say hello.")]


@scenario
def tools_call_result_answer() -> None:
    bound = chat().bind_tools([get_weather], tool_choice="required", strict=True)
    messages: list[Any] = [HumanMessage("What is the weather in Rome?")]
    first = bound.invoke(messages)
    assert isinstance(first, AIMessage)
    assert first.tool_calls
    messages.append(first)
    messages += [get_weather.invoke(call) for call in first.tool_calls]
    assert isinstance(messages[-1], ToolMessage)
    assert chat(max_tokens=16).bind_tools([get_weather]).invoke(messages)


@scenario
def tools_streamed_and_go_on() -> None:
    whole: Any = None
    for chunk in chat().bind_tools([get_weather], tool_choice="get_weather", strict=True).stream("Rome?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
    messages = [HumanMessage("Rome?"), whole, *[get_weather.invoke(call) for call in whole.tool_calls]]
    assert chat(max_tokens=16).invoke(messages)


@scenario
def tools_left_to_the_model() -> None:
    assert chat().bind_tools([get_weather], parallel_tool_calls=False).invoke("What is the weather in Rome?")


@scenario
def structured_output_by_schema() -> None:
    assert isinstance(chat().with_structured_output(Weather, method="json_schema").invoke("Rome?"), Weather)
    told = chat().with_structured_output(Weather, method="json_schema", include_raw=True).invoke("Rome?")
    assert chat(max_tokens=8).invoke([HumanMessage("Rome?"), told["raw"], HumanMessage("Again.")])


@scenario
def structured_output_by_call() -> None:
    assert isinstance(chat().with_structured_output(Weather, method="function_calling").invoke("Rome?"), Weather)
    assert isinstance(
        chat().with_structured_output(Weather, method="function_calling", strict=True).invoke("Rome?"), Weather
    )


@scenario
def structured_output_by_json_mode() -> None:
    """A model of this size does not always come to an end."""
    with suppress(openai.LengthFinishReasonError):
        told = chat().with_structured_output(None, method="json_mode", include_raw=True).invoke("Answer in JSON.")
        assert told["raw"].text


@scenario
def structured_output_streamed() -> None:
    parts = list(chat().with_structured_output(Weather, method="json_schema").stream("Rome?"))
    assert isinstance(parts[-1], Weather)


@scenario
def log_probabilities_choices_stops() -> None:
    settings = chat(max_tokens=8, logprobs=True, top_logprobs=2, stop_sequences=["\n", "END"], seed=4)
    assert settings.invoke("Say hello.").response_metadata["logprobs"]["content"]
    told = chat(max_tokens=4, n=2, temperature=1).generate([[HumanMessage("Say hello.")]])
    assert len(told.generations[0]) == 2


@scenario
def completions() -> None:
    plain = OpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=8, max_retries=0)
    assert plain.invoke("Once upon a time")
    assert plain.generate(["One", "Two"]).generations
    assert list(plain.stream("Once upon a time"))


@scenario
def responses() -> None:
    answer = chat(use_responses_api=True).invoke("Say hello.")
    assert answer.text
    bound = chat(use_responses_api=True).bind_tools([get_weather], tool_choice="required")
    messages: list[Any] = [HumanMessage("Rome?"), bound.invoke("Rome?")]
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    assert chat(use_responses_api=True).bind_tools([get_weather]).invoke(messages)
    assert list(chat(use_responses_api=True).stream("Say hello."))


@scenario
def too_long_a_conversation() -> None:
    with Raises(ContextOverflowError):
        chat(max_tokens=4).invoke(TOO_LONG)


if __name__ == "__main__":
    main()
