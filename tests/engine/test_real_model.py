"""SmolLM2-135M-Instruct in float32 on real prompts: every method gives the reference library's greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import prompts
from benchmarks.reference import SOURCE, smollm2
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import CostProfile, Envelope
from pilotfish_engine.engine import assemble
from pilotfish_engine.messages import SamplingParams, Submit
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load

MAX_TOKENS = 16
HEAD = "package://pilotfish_drafts/smollm2-135m-eagle3"
SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)
CAPACITY = CapacityConfig(max_running_requests=10, kv_tokens=8192, chunk_size=256)


def envelope(num_steps: int, topk: int, num_draft_tokens: int) -> Envelope:
    return Envelope(
        num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens, tuning="Fixed", disable_threshold=1000
    )


@pytest.fixture(scope="module", autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return smollm2(torch.float32)


@pytest.fixture(scope="module")
def real_prompts() -> list[list[int]]:
    """50 prompts of three kinds, cut to their last 80 tokens to keep the test short."""
    tokenizer = load(resolve(SOURCE))
    texts = prompts.chat(20) + prompts.code(20) + prompts.sums(10)
    return [tokenizer.encode_chat([{"role": "user", "content": text}])[-80:] for text in texts]


@pytest.fixture(scope="module")
def draft(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary: the target's own first eight layers."""
    whole = reference.config.to_dict()
    kept = {name: whole[name] for name in SHAPE} | {"num_hidden_layers": 8}
    small = LlamaForCausalLM(LlamaConfig(**kept))
    small.load_state_dict(reference.state_dict(), strict=False)
    folder = tmp_path_factory.mktemp("draft")
    small.save_pretrained(folder)
    return folder


def generate(
    method: str, draft: str | None, settings: Envelope, batch: list[list[int]]
) -> tuple[list[list[int]], float]:
    """The answers, and the drafts accepted as a share of those verified."""
    parts = assemble(
        EngineConfig(
            model=ModelConfig(source=SOURCE, dtype="float32", max_model_len=512),
            speculation=SpeculationConfig(method=method, draft=draft, envelope=settings),
            capacity=CAPACITY,
        ),
        CostProfile(verify_ms=((1, 50.0),)),  # of no matter where settings are fixed
    )
    scheduler = Scheduler(parts.worker, parts.chunk_size, parts.stop_text)
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(batch):
        answers[str(number)] = []
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        scheduler.submit(Submit(request_id=str(number), prompt=prompt, params=params))
    while scheduler.has_work:
        for output in scheduler.step():
            assert output.error is None
            answers[output.request_id] += output.token_ids
    scheduler.check()
    counters = scheduler.report().counters
    return list(answers.values()), counters.accepted_tokens / max(1, counters.drafted_tokens)


@pytest.fixture(scope="module")
def plain_answers(real_prompts: list[list[int]]) -> list[list[int]]:
    return generate("None", None, Envelope(), real_prompts)[0]


def test_plain_answers_are_the_reference_s(reference, real_prompts, plain_answers):
    """Token by token: each is the reference's argmax over all that stands before it."""
    for prompt, answer in zip(real_prompts, plain_answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(dim=1).tolist() == answer
        assert len(answer) == MAX_TOKENS or answer[-1] == reference.config.eos_token_id


def test_n_gram_drafts_change_no_token(real_prompts, plain_answers):
    answers, accepted = generate("NGRAM", None, envelope(4, 2, 8), real_prompts)
    assert answers == plain_answers
    assert accepted > 0.05


def test_a_standalone_draft_changes_no_token(draft, real_prompts, plain_answers):
    answers, accepted = generate("STANDALONE", str(draft), envelope(3, 2, 6), real_prompts)
    assert answers == plain_answers
    assert 0 < accepted < 1


def test_a_draft_equal_to_the_target_is_always_accepted(real_prompts, plain_answers):
    """With answers that no end cuts short, chunks of the prompt included."""
    chosen = [(p, a) for p, a in zip(real_prompts, plain_answers, strict=True) if len(a) == MAX_TOKENS][:6]
    answers, accepted = generate("STANDALONE", SOURCE, envelope(3, 1, 4), [p for p, _ in chosen])
    assert answers == [a for _, a in chosen]
    # 1 token from the prompt, then steps of 4: 15 tokens are 3 whole steps and 3 of the last one's 4
    assert accepted == 1.0


def test_the_head_that_comes_with_pilotfish_changes_no_token(real_prompts, plain_answers):
    answers, accepted = generate("Auto", HEAD, envelope(4, 1, 5), real_prompts)
    assert answers == plain_answers
    assert accepted > 0.2
