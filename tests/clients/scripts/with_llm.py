"""What people do with the llm command and its extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scenario import MODEL, TOO_LONG, URL, main, scenario

FOLDER = Path(tempfile.mkdtemp(prefix="llm-"))
FUNCTION = '''
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return "It is sunny."
'''
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
MODELS = f"""\
- model_id: chat
  model_name: {MODEL}
  api_base: {URL}
  supports_tools: true
  supports_schema: true
- model_id: plain
  model_name: {MODEL}
  api_base: {URL}
  completion: true
- model_id: responses
  model_name: {MODEL}
  api_base: {URL}
  responses: true
  supports_tools: true
  supports_schema: true
"""


def llm(*arguments: str, fails: bool = False) -> str:
    (FOLDER / "extra-openai-models.yaml").write_text(MODELS)
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    surroundings = os.environ | {"LLM_USER_PATH": str(FOLDER)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=surroundings, stdin=subprocess.DEVNULL, timeout=300
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout or done.stderr


def limit(count: int) -> tuple[str, ...]:
    return ("-o", "max_tokens", str(count), "-o", "temperature", "0")


@scenario
def prompt_streamed() -> None:
    assert llm("-m", "chat", "Say hello.", "-s", "Be kind.", *limit(16)).strip()


@scenario
def prompt_whole_and_go_on() -> None:
    assert llm("-m", "chat", "--no-stream", "Say hello.", *limit(16)).strip()
    assert llm("-m", "chat", "-c", "Again.", *limit(16)).strip()


@scenario
def schema() -> None:
    told = llm("-m", "chat", "--schema", json.dumps(SCHEMA), "Rome?", *limit(60))
    assert json.loads(told)["city"] in ("Rome", "Oslo")


@scenario
def tools() -> None:
    told = llm("-m", "chat", "--functions", FUNCTION, "--td", "What is the weather in Rome?", *limit(60))
    assert told.strip()


@scenario
def completion() -> None:
    assert llm("-m", "plain", "Once upon a time", *limit(8))


@scenario
def responses() -> None:
    assert llm("-m", "responses", "Say hello.", *limit(16)).strip()


@scenario
def every_option() -> None:
    options = [
        word for name, value in (("top_p", "0.9"), ("frequency_penalty", "0.1"), ("presence_penalty", "0.1"),
                                 ("stop", "END"), ("seed", "5"), ("logit_bias", '{"5": -100}'))
        for word in ("-o", name, value)
    ]  # fmt: skip
    assert llm("-m", "chat", "Say hello.", *limit(8), *options)


@scenario
def json_object() -> None:
    assert llm("-m", "chat", "Answer in JSON.", *limit(40), "-o", "json_object", "1")


@scenario
def too_long_a_conversation() -> None:
    assert "too long" in llm("-m", "chat", TOO_LONG, *limit(4), fails=True)


if __name__ == "__main__":
    main()
