"""What the routes share: the link to the model process, the tokenizer, and whether a request can be taken now.

Knows nothing about HTTP but that a refusal is an ApiError.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pilotfish_engine.config import EngineConfig
from pilotfish_engine.contract.speculation import EngineReport
from pilotfish_engine.messages import CoreReady
from pilotfish_engine.server.body import Body, header
from pilotfish_engine.server.conversation import Message, Tool
from pilotfish_engine.server.failures import ApiError, Invalid, Unavailable
from pilotfish_engine.server.generation import check_prompt, too_long
from pilotfish_engine.server.link import Link
from pilotfish_engine.server.metrics import Metrics
from pilotfish_engine.server.reading import Formats, formats_of
from pilotfish_engine.server.unserved import OFTEN_IGNORED
from pilotfish_engine.source import default_name
from pilotfish_engine.tokenizer import TemplateError, Tokenizer
from pilotfish_engine.tokenizer.apart import TextError, TextProcesses

READY_SILENCE = 10.0  # seconds without a heartbeat: a long chunk on a CPU takes two or three
LIVE_SILENCE = 60.0


class Service:
    """tokenizer: None until it is loaded. draining: set once, when the process was told to end."""

    def __init__(self, config: EngineConfig, link: Link, admin_token: str | None) -> None:
        self.name = config.server.served_name or default_name(config.model.source)
        self.fingerprint = _fingerprint(config)
        self.link = link
        self.admin_token = admin_token
        self.metrics = Metrics()
        self.tokenizer: Tokenizer | None = None
        self.draining = False
        self._config = config.server
        self._texts: TextProcesses | None = None
        self._started = time.monotonic()
        self._max_waiting = config.capacity.max_waiting_requests

    def close(self) -> None:
        self.link.close()
        if self._texts is not None:
            self._texts.close()

    def use(self, tokenizer: Tokenizer, texts: TextProcesses) -> None:
        """From now on, and closes `texts` in the end."""
        self.tokenizer, self._texts = tokenizer, texts

    def signed(self, report: EngineReport) -> EngineReport:
        """The report with where it comes from and how old this engine is."""
        uptime = time.monotonic() - self._started
        return report.model_copy(update={"pod": self._config.pod_uid, "uptime_seconds": uptime})

    def why_not_live(self) -> str | None:
        if self.link.gone is not None:
            return str(self.link.gone)
        if self.link.ready is not None and self.link.silence > LIVE_SILENCE:
            return f"the model process has been silent for {self.link.silence:.0f} s"
        return None

    def why_not_ready(self) -> str | None:
        if self.draining:
            return "the engine is shutting down"
        if self.link.gone is not None:
            return str(self.link.gone)
        if self.link.ready is None or self.tokenizer is None:
            return "the model is loading"
        if self.link.silence > READY_SILENCE:
            return f"the model process has been silent for {self.link.silence:.0f} s"
        return self.link.unready

    def loaded(self) -> tuple[Tokenizer, CoreReady]:
        """Raises Unavailable when no request can be taken now."""
        reason = self.why_not_ready()
        if reason is not None or self.tokenizer is None or self.link.ready is None:
            raise Unavailable(f"{reason}; try again", "not_ready")
        return self.tokenizer, self.link.ready

    def admit(self, count: int) -> None:
        """Raises Unavailable unless `count` more requests may run or wait. Submit them before the next await."""
        _, limits = self.loaded()
        if self.link.in_flight + count > limits.max_running_requests + self._max_waiting:
            raise Unavailable(
                f"the queue is full: {self.link.in_flight} requests run or wait, "
                f"{limits.max_running_requests} can run and {self._max_waiting} wait; try again",
                "queue_full",
            )

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise ApiError(
                404, f"the model {name!r} is not served here; {self.name!r} is", param="model", code="model_not_found"
            )

    def ignored(self, body: Body) -> str:
        """The fields of a request that change nothing, counted, as its answer's header names them."""
        paths = list(body.ignored())
        for path in paths:
            name = str(path[-1])
            self.metrics.ignored_fields.labels(name if name in OFTEN_IGNORED else "other").inc()
        return header(paths)

    @property
    def context(self) -> int:
        """Tokens that one prompt and its answer may have together."""
        _, limits = self.loaded()
        return limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Tokens that are the tokenizer's and have a row in the model: one may have more of them than the other."""
        tokenizer, limits = self.loaded()
        return tokenizer.vocab_size if limits.vocab_size is None else limits.vocab_size

    async def encode(self, prompt: str | list[int], field: str, *, answered: bool = True) -> list[int]:
        """Raises Invalid when the model cannot take it. answered: by one token at least."""
        if isinstance(prompt, str):
            prompt = await self.tokens_of(prompt, field, add_special_tokens=True)
        check_prompt(prompt, self.context, answered, self.vocab_size, field)
        return prompt

    def formats(self, *, tools: bool) -> Formats:
        """How the model writes calls and reasoning, in chats with or without tools."""
        tokenizer, _ = self.loaded()
        return formats_of(self._config, tokenizer, tools)

    async def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]
    ) -> list[int]:
        """variables: what the template gets beside messages and tools. Raises Invalid."""
        return await self.encode_rendered(await self.render_chat(messages, tools, variables))

    async def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]
    ) -> str:
        """The prompt's text, which asks for the next message. Raises Invalid."""
        tokenizer, _ = self.loaded()
        if tokenizer.chat_template is None:
            raise Invalid(f"the model {self.name!r} has no chat template; /v1/completions would work", "messages")
        assert self._texts is not None, "it is there when the tokenizer is"
        shown = [message.for_template() for message in messages]
        try:
            return await self._texts.render(shown, [tool.for_template() for tool in tools], variables)
        except TemplateError as error:
            raise Invalid(f"messages: {error}", "messages") from error

    async def encode_rendered(self, text: str, *, answered: bool = True) -> list[int]:
        """As `encode`, of a chat."""
        prompt = await self.tokens_of(text, "messages", add_special_tokens=False)
        check_prompt(prompt, self.context, answered, self.vocab_size, "messages")
        return prompt

    async def tokens_of(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        """Raises Invalid for a text that cannot fit into the context, before it costs anything."""
        tokenizer, _ = self.loaded()
        if len(text) > self.context * tokenizer.longest_piece:  # too long however it is split
            raise too_long(field, f"has {len(text)} characters", self.context, answered=True)
        assert self._texts is not None, "it is there when the tokenizer is"
        try:
            return await self._texts.encode(text, add_special_tokens=add_special_tokens)
        except TextError as error:
            raise Invalid(f"{field}: {error}", field) from error


def _fingerprint(config: EngineConfig) -> str:
    """The same for engines whose answers to a seed are the same: drafts, batches and caches change none."""
    what = f"{config.model.source} {config.model.dtype} {config.capacity.tensor_parallel_size}"
    return "fp_" + hashlib.sha256(what.encode()).hexdigest()[:12]
