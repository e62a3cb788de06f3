"""What people do with pydantic-ai, over chat completions and over /v1/responses."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    ModelSettings,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UnexpectedModelBehavior,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider
from scenario import MODEL, TOO_LONG, URL, Raises, main, scenario

SETTINGS = ModelSettings(max_tokens=80, temperature=0)


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=0, le=9)


def chat() -> Any:
    """A client is bound to the event loop that runs it."""
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))


def responses() -> Any:
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(openai_client=client))


def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather of a city."""
    return f"It is sunny in {city}."


def measure(city: Literal["Rome", "Oslo"]) -> dict[str, Any]:
    """Tells the weather of a city."""
    return {"city": city, "degrees": 7}


@scenario
async def run_and_go_on() -> None:
    agent = Agent(chat(), instructions="Be kind.", model_settings=SETTINGS)
    first = await agent.run("Say hello.")
    assert first.output
    assert first.usage.output_tokens > 0
    assert (await agent.run("Again.", message_history=first.all_messages())).output


@scenario
async def function_tools() -> None:
    agent = Agent(chat(), tools=[get_weather], model_settings=SETTINGS)
    result = await agent.run("What is the weather in Rome?")
    kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert "tool-return" in kinds, kinds
    assert result.output


@scenario
async def output_by_tool() -> None:
    result = await Agent(chat(), output_type=ToolOutput(Weather), model_settings=SETTINGS).run("Rome?")
    assert isinstance(result.output, Weather)


@scenario
async def output_by_strict_tool() -> None:
    output = ToolOutput(Weather, strict=True)
    result = await Agent(chat(), output_type=output, model_settings=SETTINGS).run("Rome?")
    assert isinstance(result.output, Weather)


@scenario
async def output_by_schema() -> None:
    result = await Agent(chat(), output_type=NativeOutput(Weather), model_settings=SETTINGS).run("Rome?")
    assert isinstance(result.output, Weather)


@scenario
async def output_by_schema_with_tools() -> None:
    """A call and then an answer by the schema, each the model's own choice: a small one repeats JSON that a tool has
    returned, where behind a sentence it would call the tool again and again."""
    agent = Agent(chat(), tools=[measure], output_type=NativeOutput(Weather), model_settings=SETTINGS)
    result = await agent.run("What is the weather in Rome?")
    kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert kinds == ["user-prompt", "tool-call", "tool-return", "text"], kinds
    assert isinstance(result.output, Weather)


@scenario
async def output_by_schema_as_of_a_server_of_ones_own() -> None:
    """With vLLM's provider the schema is in the instructions as well."""
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    model: Any = OpenAIChatModel(MODEL, provider=VLLMProvider(openai_client=client))
    agent = Agent(model, tools=[measure], output_type=NativeOutput(Weather), model_settings=SETTINGS)
    assert isinstance((await agent.run("What is the weather in Rome?")).output, Weather)


@scenario
async def output_of_several_types() -> None:
    class Advice(BaseModel):
        """What to wear."""

        wear: Literal["coat", "hat"]

    both: Any = [Weather, Advice]
    result = await Agent(chat(), output_type=both, model_settings=SETTINGS).run("Rome?")
    assert isinstance(result.output, Weather | Advice)


@scenario
async def text_streamed() -> None:
    async with Agent(chat(), model_settings=SETTINGS).run_stream("Say hello.") as result:
        assert [text async for text in result.stream_text(delta=True)]
    assert result.usage.output_tokens > 0


@scenario
async def output_streamed() -> None:
    async with Agent(chat(), output_type=Weather, model_settings=SETTINGS).run_stream("Rome?") as result:
        parts = [part async for part in result.stream_output()]
    assert isinstance(parts[-1], Weather)


@scenario
async def events_of_a_run() -> None:
    agent = Agent(chat(), tools=[get_weather], model_settings=SETTINGS)
    async with agent.iter("What is the weather in Oslo?") as run:
        nodes = [type(node).__name__ async for node in run]
    assert "CallToolsNode" in nodes


@scenario
async def responses_run_tools_output() -> None:
    assert (await Agent(responses(), instructions="Be kind.", model_settings=SETTINGS).run("Say hello.")).output
    assert (await Agent(responses(), tools=[get_weather], model_settings=SETTINGS).run("Rome?")).output
    typed = await Agent(responses(), output_type=NativeOutput(Weather), model_settings=SETTINGS).run("Rome?")
    assert isinstance(typed.output, Weather)
    by_tool = await Agent(responses(), output_type=ToolOutput(Weather), model_settings=SETTINGS).run("Rome?")
    assert isinstance(by_tool.output, Weather)


@scenario
async def responses_streamed() -> None:
    async with Agent(responses(), model_settings=SETTINGS).run_stream("Say hello.") as result:
        assert [text async for text in result.stream_text(delta=True)]


@scenario
async def prompted_output() -> None:
    """The schema is in the prompt, and JSON is asked for: what a small model makes of it is its own affair."""
    agent = Agent(chat(), output_type=PromptedOutput(Weather), model_settings=SETTINGS, retries=0)
    with suppress(UnexpectedModelBehavior):
        await agent.run("Rome?")


@scenario
async def too_long_a_conversation() -> None:
    with Raises(ModelHTTPError) as caught:
        await Agent(chat(), model_settings=SETTINGS).run(TOO_LONG)
    assert caught.error.status_code == 400


if __name__ == "__main__":
    main()
