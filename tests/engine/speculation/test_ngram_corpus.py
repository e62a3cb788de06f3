"""A corpus of texts: what is refused and when, how files are read, and that answers stay what they are."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch

import pilotfish_engine.engine as engine_module
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.errors import MethodError
from pilotfish_engine.speculation import ngram_corpus
from tests.engine.conformance.conftest import VOCAB, prompts
from tests.engine.conformance.harness import Harness, fixed
from tests.engine.conformance.models import target_model

LETTERS = string.ascii_letters + string.digits + "+-"
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    "model": {"type": "BPE", "vocab": {letter: number for number, letter in enumerate(LETTERS)}, "merges": []},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 tokens that are 64 letters."""
    assert len(LETTERS) == VOCAB
    folder = tmp_path_factory.mktemp("target")
    target_model().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


def build(target: Path, corpus: Path | None, method: str = "NGRAM", draft: str | None = None) -> Parts:
    return assemble(
        EngineConfig(
            model=ModelConfig(source=str(target), dtype="float32", max_model_len=128),
            speculation=SpeculationConfig(
                method=method,
                draft=draft,
                draft_corpus=None if corpus is None else str(corpus),
                envelope=Envelope(num_steps=4, topk=4, num_draft_tokens=10),
            ),
            capacity=CapacityConfig(max_running_requests=4),
        )
    )


def answers(parts: Parts, num_steps: int, topk: int, asked: list[list[int]]) -> tuple[list[list[int]], int]:
    """The answers, and in how many steps they came."""
    harness = Harness(parts)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    ids = [harness.submit(prompt, max_tokens=24, ignore_eos=True) for prompt in asked]
    steps = 0
    while harness.scheduler.has_work:
        harness.step()
        steps += 1
    return [harness.answers[i].token_ids for i in ids], steps


def text(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def numbers(letters: str) -> list[int]:
    return [LETTERS.index(letter) for letter in letters]


@pytest.mark.parametrize("form", ["corpus.txt", "corpus.jsonl"])
@pytest.mark.parametrize("topk", [1, 4])
def test_a_corpus_gives_drafts_that_the_request_cannot(target, tmp_path, topk, form):
    asked = prompts(2, seed=3, longest=9)[:1]
    plain = build(target, None)
    expected, _ = answers(plain, 0, 1, asked)
    alone, steps_alone = answers(plain, 4, topk, asked)
    documents = ["unrelated" * 3, text(asked[0] + expected[0])]
    file = tmp_path / form
    file.write_text("\n".join(map(json.dumps, documents)) if form.endswith(".jsonl") else "\n\n".join(documents))
    helped, steps = answers(build(target, file, method="Auto"), 4, topk, asked)
    assert helped == alone == expected
    assert steps <= 1 + -(-24 // 5) < steps_alone  # the prompt's pass, then five tokens a step


def test_no_corpus_changes_an_answer(target):
    asked = prompts(4, seed=8)
    parts = build(target, None)
    expected, _ = answers(parts, 0, 1, asked)
    generator = torch.Generator().manual_seed(5)
    proposer = parts.step.proposer
    assert proposer is not None
    for length in (2, 40, 400):
        documents = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for _ in range(5)]
        documents.append([*asked[0], *expected[1]])
        corpus = ngram_corpus.index(list(map(text, documents)), numbers, torch.device("cpu"))
        proposer._corpus = corpus  # type: ignore[attr-defined]
        for num_steps, topk in [(4, 1), (4, 4)]:
            assert answers(parts, num_steps, topk, asked)[0] == expected


def test_documents_are_blocks_or_json_strings(tmp_path):
    blocks = tmp_path / "c.txt"
    blocks.write_bytes("\n\nfirst\nstill it\n \t\nsecond é\r\n\r\n\n third".encode())
    assert ngram_corpus.read(blocks) == ["first\nstill it\n", "second é\r\n", " third"]
    strings = tmp_path / "c.jsonl"
    strings.write_text('"one\\n\\nstill it"\n\n"two\u2028"\n" "\n')
    assert ngram_corpus.read(strings) == ["one\n\nstill it", "two\u2028"]


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("c", None, r"c cannot be read \(No such file or directory\); give UTF-8 text with a blank line"),
        ("c/", None, r"is no file; give"),
        ("c", b"", r"has no text in it"),
        ("c", b" \n\n\t\n", r"has no text in it"),
        ("c", b"text\xff", r"is not UTF-8 at byte 4; give"),
        ("c", b"\x00\x01\x02", r"is binary: byte 0 is zero"),
        ("c.jsonl", b'"good"\n{"text": "no"}', r"line 2: dict is no string; give .* \.jsonl file"),
        ("c.jsonl", b'"good"\n\n"half', r"line 3: Unterminated string"),
        ("c.jsonl", b"[" * 100_000, r"line 1: "),
        ("c.jsonl", b'"\\ud800"', r"line 1: .*surrogates not allowed"),
        ("c.jsonl", b"\n", r"has no text in it"),
    ],
)
def test_a_file_that_cannot_work_is_refused_before_the_target_is_loaded(
    target, tmp_path, monkeypatch, name, data, sentence
):
    monkeypatch.setattr(engine_module, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    file = tmp_path / name
    if data is not None:
        file.write_bytes(data)
    elif name.endswith("/"):
        file.mkdir()
    with pytest.raises(MethodError, match=rf"the corpus .*{sentence}"):
        build(target, file)


def test_a_file_that_is_too_large(target, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    file = tmp_path / "large"
    with file.open("wb") as handle:
        handle.truncate(ngram_corpus.MAX_BYTES + 1)  # sparse
    with pytest.raises(MethodError, match=r"large has 67108865 bytes; at most 67108864 \(64 MiB\) would work"):
        build(target, file)


@pytest.mark.parametrize(
    ("method", "draft", "sentence"),
    [
        ("None", None, r"method None takes no corpus, but the corpus is '.*'; leave it out or name "),
        ("STANDALONE", "", r"method STANDALONE takes no corpus"),
        ("Auto", "", r"the draft .*, with the corpus .* beside it, is none that a method knows"),
    ],
)
def test_a_method_that_takes_no_corpus(target, tmp_path, method, draft, sentence):
    (tmp_path / "c").write_text("text")
    with pytest.raises(MethodError, match=sentence):
        build(target, tmp_path / "c", method, None if draft is None else str(target))


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    target_model().save_pretrained(tmp_path / "bare")
    (tmp_path / "c").write_text("text")
    with pytest.raises(MethodError, match=r"c is text, and the target bare comes without a tokenizer; leave"):
        build(tmp_path / "bare", tmp_path / "c")


def test_texts_of_one_token_each(target, tmp_path):
    (tmp_path / "c").write_text("a\n\nb")
    with pytest.raises(MethodError, match="no document of the corpus has two tokens"):
        build(target, tmp_path / "c")
