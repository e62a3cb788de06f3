"""A served model with fewer rows than its tokenizer has tokens: what has no row is refused, by field and range."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.server import letters
from tests.engine.server.serving import NAME, Engine


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("short")
    with letters.serving(folder, letters.model(letters.tokenizer().get_vocab_size() - 1)) as engine:
        yield engine


LAST = letters.tokenizer().get_vocab_size() - 1


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt", {"prompt": [3, LAST]}),
        ("prompt", {"prompt": "abc"}),  # the tokenizer's last token
        ("logit_bias", {"prompt": "xy", "logit_bias": {str(LAST): 5}}),
        ("stop_token_ids", {"prompt": "xy", "stop_token_ids": [LAST]}),
    ],
)
def test_a_token_without_a_row_is_refused(short: Engine, field: str, body: dict[str, object]) -> None:
    with short.http as client:
        answer = client.post("/v1/completions", json={"model": NAME, "max_tokens": 3} | body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), error
        assert f"0 to {LAST - 1} would work" in error["message"]


def test_grammars_and_the_last_row_work(short: Engine) -> None:
    asked = {"model": NAME, "prompt": [1, LAST - 1], "max_tokens": 8, "structured_outputs": {"regex": "(ab|x){2}"}}
    with short.http as client:
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] in ("abab", "abx", "xab", "xx")
