"""What people do with the OpenAI Agents SDK, over /v1/responses and over chat completions."""

from __future__ import annotations

from typing import Any, Literal

import agents
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel
from scenario import MODEL, TOO_LONG, URL, Raises, main, scenario

agents.set_tracing_disabled(True)


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    sunny: bool


@agents.function_tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather of a city."""
    return f"It is sunny in {city}."


def models() -> list[Any]:
    """One for each of the SDK's two ways; a client is bound to the event loop that runs it."""
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    return [
        agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        agents.OpenAIResponsesModel(model=MODEL, openai_client=client),
    ]


def settings(**changes: Any) -> agents.ModelSettings:
    return agents.ModelSettings(temperature=0, max_tokens=80, **changes)


async def answers(model: Any) -> None:
    agent = agents.Agent(name="Plain", instructions="Be kind.", model=model, model_settings=settings())
    result = await agents.Runner.run(agent, "Say hello.")
    assert result.final_output
    again = await agents.Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "Again."}])
    assert again.final_output


async def calls_tools(model: Any) -> None:
    agent = agents.Agent(
        name="Weather", instructions="Use tools.", model=model, tools=[get_weather],
        model_settings=settings(tool_choice="required"),
    )  # fmt: skip
    result = await agents.Runner.run(agent, "What is the weather in Rome?", max_turns=4)
    kinds = [type(item).__name__ for item in result.new_items]
    assert kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"], kinds
    assert result.final_output


async def gives_typed_output(model: Any) -> None:
    agent = agents.Agent(
        name="Typed", instructions="Answer.", model=model, output_type=Weather, model_settings=settings()
    )
    assert isinstance((await agents.Runner.run(agent, "Rome?")).final_output, Weather)


async def streams(model: Any) -> None:
    agent = agents.Agent(
        name="Weather", instructions="Use tools.", model=model, tools=[get_weather],
        model_settings=settings(tool_choice="required", include_usage=True),
    )  # fmt: skip
    result = agents.Runner.run_streamed(agent, "What is the weather in Oslo?", max_turns=4)
    kinds = {event.type async for event in result.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    assert result.final_output


async def hands_over(model: Any) -> None:
    other = agents.Agent(name="Other", instructions="Say hello.", model=model, model_settings=settings())
    first = agents.Agent(
        name="First", instructions="Hand over.", model=model, handoffs=[other],
        model_settings=settings(tool_choice="required"),
    )  # fmt: skip
    result = await agents.Runner.run(first, "Hello?", max_turns=4)
    assert result.last_agent.name == "Other"


def over(index: int, run: Any, name: str) -> None:
    async def played() -> None:
        await run(models()[index])

    played.__name__ = name
    scenario(played)


for _index, _way in enumerate(("chat", "responses")):
    for _run in (answers, calls_tools, gives_typed_output, streams, hands_over):
        over(_index, _run, f"{_way}_{_run.__name__}")


@scenario
async def too_long_a_conversation() -> None:
    for model in models():
        agent = agents.Agent(name="Plain", model=model, model_settings=settings())
        with Raises(BadRequestError):
            await agents.Runner.run(agent, TOO_LONG)


if __name__ == "__main__":
    main()
