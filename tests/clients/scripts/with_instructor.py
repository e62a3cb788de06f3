"""What people do with instructor, in its modes for OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field
from scenario import MODEL, URL, Raises, main, scenario

Mode = instructor.Mode


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=0, le=9)


class Advice(BaseModel):
    """What to wear."""

    wear: Literal["coat", "hat"]


def patched(mode: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none", max_retries=0), mode=mode)


def ask(mode: Any, model: Any, method: str = "create", **fields: Any) -> Any:
    limit = "max_output_tokens" if mode == Mode.RESPONSES_TOOLS else "max_tokens"
    create = getattr(patched(mode).chat.completions, method)
    return create(
        model=MODEL, messages=[{"role": "user", "content": "What is the weather in Rome?"}], response_model=model,
        max_retries=1, temperature=0, **{limit: 100}, **fields,
    )  # fmt: skip


@scenario
def tools() -> None:
    assert isinstance(ask(Mode.TOOLS, Weather), Weather)


@scenario
def tools_strict() -> None:
    assert isinstance(ask(Mode.TOOLS_STRICT, Weather), Weather)


@scenario
def json_schema() -> None:
    assert isinstance(ask(Mode.JSON_SCHEMA, Weather), Weather)


@scenario
def parallel_tools() -> None:
    told = list(ask(Mode.PARALLEL_TOOLS, Iterable[Weather | Advice]))
    assert told
    assert all(isinstance(value, Weather | Advice) for value in told)


@scenario
def responses_tools() -> None:
    assert isinstance(ask(Mode.RESPONSES_TOOLS, Weather), Weather)


@scenario
def partial_answers_streamed() -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
        parts = list(ask(mode, Weather, "create_partial"))
        assert parts[-1].city in ("Rome", "Oslo"), mode


@scenario
def several_answers_streamed() -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        assert all(isinstance(part, Weather) for part in ask(mode, Weather, "create_iterable")), mode


@scenario
def answers_with_what_they_came_in() -> None:
    told, raw = ask(Mode.TOOLS, Weather, "create_with_completion")
    assert isinstance(told, Weather)
    assert raw.choices[0].finish_reason in ("stop", "tool_calls")


@scenario
def asked_again_when_a_check_fails() -> None:
    """The wrong answer and what is wrong with it go back to the model."""

    class Never(BaseModel):
        model_config = ConfigDict(extra="forbid")

        city: Literal["Rome", "Oslo"]
        seen: bool

        def model_post_init(self, context: Any) -> None:
            raise ValueError("never right")

    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        with Raises(InstructorRetryException) as caught:
            patched(mode).chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Rome?"}], response_model=Never, max_retries=2,
                temperature=0, max_tokens=100,
            )  # fmt: skip
        assert caught.error.n_attempts == 3, (mode, str(caught.error))


@scenario
async def at_once() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0), mode=Mode.TOOLS)
    told = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Rome?"}], response_model=Weather, max_retries=1,
        temperature=0, max_tokens=100,
    )  # fmt: skip
    assert isinstance(told, Weather)


if __name__ == "__main__":
    main()
