"""The client's side: one streamed question, and a bounded load of many, through the OpenAI client.

Knows nothing about Kubernetes: it is given base URLs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import openai

from examples.demo import screen

# Talk: its next words are harder to guess, and a busy server pays for every guess.
PROMPTS = (
    "Explain in three sentences why the sea is salty.",
    "Tell a short story about a small fish and a large shark.",
    "What should one know before a first dive?",
    "Describe a harbour in the early morning.",
    "Give advice to somebody who is afraid of deep water.",
    "Why do birds follow fishing boats?",
)
ANSWER_TOKENS = 96


def ask(url: str, model: str, question: str, max_tokens: int = 160) -> str:
    """Streams the answer to the screen and returns it."""
    client = openai.OpenAI(base_url=url, api_key="not-needed", max_retries=0, timeout=600)
    started, first, text = time.monotonic(), 0.0, ""
    with client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=max_tokens, temperature=0,
        stream=True, stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        tokens = 0
        for chunk in stream:
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
            if chunk.choices and (piece := chunk.choices[0].delta.content):
                first = first or time.monotonic()
                text += piece
                screen.piece(piece)
    spent = time.monotonic() - first
    screen.say(f"\n({tokens} tokens, first after {first - started:.2f} s, then {(tokens - 1) / spent:.1f} tokens/s)")
    return text


@dataclass
class Load:
    """Keeps `users` requests in flight over the URLs that `urls` gives, until it is left; ends by itself at `seconds`.

    done and failed count answers; a URL that is gone when a request is sent to it is one failure, not an error.
    """

    model: str
    users: int
    urls: Callable[[], Sequence[str]]
    seconds: float = 240
    done: int = 0
    failed: int = 0
    last_error: str = ""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Load:
        turn = itertools.count()
        self._client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="not-needed", max_retries=0, timeout=600)
        self._tasks = [asyncio.create_task(self._user(turn)) for _ in range(self.users)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def _user(self, turn: itertools.count[int]) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            urls, number = self.urls(), next(turn)
            if not urls:
                await asyncio.sleep(0.5)
                continue
            client = self._client.with_options(base_url=urls[number % len(urls)])
            try:
                await client.chat.completions.create(
                    model=self.model, max_tokens=ANSWER_TOKENS, temperature=0.8,
                    messages=[{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
                )  # fmt: skip
                self.done += 1
            except openai.OpenAIError as error:
                self.failed += 1
                self.last_error = str(error)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.5)
