"""The requests that `vllm bench serve` sends, in the shapes of its published source, and how it reads the answers.

vLLM itself needs a GPU's libraries; its requests need aiohttp.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from scenario import MODEL, ROOT, URL, main, scenario

PROMPT = "The quick brown fox jumps over the lazy dog"
COMPLETION: dict[str, Any] = {
    "model": MODEL, "prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
    "max_completion_tokens": 8, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip


async def measured(path: str, payload: dict[str, Any], number: int) -> tuple[str, int]:
    """The text and the count of tokens, read as the benchmark reads them: a first chunk must have a choice."""
    text, tokens, seen = "", None, False
    headers = {"x-request-id": f"bench-{number}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{URL}{path}", json=payload, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        async for line in response.content:
            message = line.decode().strip()
            if not message or message.startswith(":") or message.endswith("[DONE]"):
                continue
            data = json.loads(message.removeprefix("data: "))
            if choices := data.get("choices"):
                seen = True
                part = choices[0].get("text") if "text" in choices[0] else choices[0]["delta"].get("content")
                text += part or ""
            elif usage := data.get("usage"):
                tokens = usage["completion_tokens"]
                assert usage["prompt_tokens"] > 0
    assert seen
    assert tokens is not None
    return text, tokens


@scenario
async def completions() -> None:
    _, tokens = await measured("/completions", COMPLETION, 1)
    assert tokens > 0


@scenario
async def completions_to_the_full_length() -> None:
    greedy = COMPLETION | {"ignore_eos": True, "temperature": 0.0}
    assert await measured("/completions", greedy, 2)
    assert await measured("/completions", COMPLETION | {"logprobs": 3, "ignore_eos": True}, 3)
    assert await measured("/completions", greedy | {"prompt": [100, 200, 300, 400]}, 4)


@scenario
async def completions_with_every_setting() -> None:
    extra = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "frequency_penalty": 0.1,
        "presence_penalty": 0.1, "repetition_penalty": 1.1, "seed": 1, "min_tokens": 2,
    }  # fmt: skip
    assert await measured("/completions", COMPLETION | extra, 5)


@scenario
async def chat() -> None:
    _, tokens = await measured("/chat/completions", CHAT, 6)
    assert tokens > 0


@scenario
async def chat_to_the_full_length() -> None:
    assert await measured("/chat/completions", CHAT | {"ignore_eos": True, "temperature": 0.0}, 7)


@scenario
async def what_it_asks_besides() -> None:
    """The model's name when none is given, and the counters before and after a run."""
    async with aiohttp.ClientSession() as session, session.get(f"{URL}/models") as response:
        assert (await response.json())["data"][0]["id"] == MODEL
    async with aiohttp.ClientSession() as session, session.get(f"{ROOT}/health") as response:
        assert response.status == 200


if __name__ == "__main__":
    main()
