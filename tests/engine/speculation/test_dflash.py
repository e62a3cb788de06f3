"""Block drafts: their logits against a second forward wherever the context comes from, and the engine's answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from transformers import LlamaForCausalLM

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.engine import Parts
from pilotfish_engine.errors import EnvelopeError
from pilotfish_engine.speculation.dflash import DFlashProposer
from pilotfish_engine.speculation.unread import CATCH_UP
from tests.engine.conformance.harness import Harness, fixed, load
from tests.engine.speculation.block_drafts import BlockDraft, block_draft, copying_pair, reference_logits, tiny_target

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

PERIOD = 7
VOCAB = 8  # few enough for a random draft to be right now and then
PROMPTS = [[5, 2, 7, 2, 6, 4, 2, 5, 0, 6, 7], [4], [6, 6, 2, 7, 5, 4, 4, 2, 0, 0, 5, 7, 6, 2, 7, 2, 4, 5, 6]]


def variants() -> dict[str, BlockDraft]:
    speculators = block_draft(VOCAB, seed=4)
    speculators.own = dict(speculators.config)
    speculators.config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy"},
        "block_size": 6,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in speculators.outputs_of],
        "draft_vocab_size": VOCAB,
        "sliding_window_non_causal": False,
        "transformer_layer_config": {
            key: value
            for key, value in speculators.own.items()
            if key not in ("architectures", "block_size", "dflash_config")
        },
    }
    cut = block_draft(VOCAB, seed=5)
    cut.own, cut.config = speculators.own, {**speculators.config, "draft_vocab_size": 5}
    torch.manual_seed(6)
    cut.tensors |= {
        "embed_tokens.weight": torch.randn(VOCAB, 32),
        "lm_head.weight": torch.randn(5, 32),
        "d2t": torch.tensor([6, 4, 2, 7, 5]) - torch.arange(5),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool),
    }
    return {
        "plain": block_draft(VOCAB),
        "bias": block_draft(VOCAB, bias=True, seed=2),
        "one layer, behind the last": block_draft(VOCAB, outputs_of=[2], num_layers=1, seed=3),
        "speculators": speculators,
        "speculators, own vocabulary": cut,
    }


DRAFTS = variants()


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target(VOCAB)


@pytest.fixture(scope="module")
def engine(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Parts]:
    folder = tmp_path_factory.mktemp("blocks")
    target.save_pretrained(folder / "target")
    loaded: dict[tuple[str, int], Parts] = {}

    def get(name: str, page_size: int = 16) -> Parts:
        if (name, page_size) not in loaded:
            draft = folder / name
            if not draft.exists():
                DRAFTS[name].save(draft)
            loaded[name, page_size] = load(folder / "target", "DFLASH", draft, page_size)
        return loaded[name, page_size]

    return get


def greedy(target: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class Recorded:
    """Every pass over blocks: the tokens known then and the logits given, by row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parts: Parts) -> None:
        self.seen: list[tuple[list[int], torch.Tensor]] = []
        proposer, state = parts.step.proposer, parts.step.state
        assert isinstance(proposer, DFlashProposer)
        original = proposer.block_logits

        def block_logits(rows: Rows, num_steps: int) -> torch.Tensor:
            logits = original(rows, num_steps)
            for row, of_row in zip(rows.host, logits, strict=True):
                self.seen.append((state.tokens[row, : state.seq_lens[row] + 1].tolist(), of_row.clone()))
            return logits

        monkeypatch.setattr(proposer, "block_logits", block_logits)

    def check(self, target: LlamaForCausalLM, draft: BlockDraft) -> None:
        assert self.seen
        for tokens, logits in self.seen:
            expected = reference_logits(target, draft, tokens, len(logits))
            torch.testing.assert_close(logits.double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", DRAFTS)
def test_logits_equal_a_second_forward(engine, target, monkeypatch, name):
    parts = engine(name)
    recorded = Recorded(monkeypatch, parts)
    harness = Harness(parts)
    harness.scheduler.set_envelope(fixed(4, 1))
    assert harness.run(PROMPTS, max_tokens=8, ignore_eos=True) == [greedy(target, p, 8) for p in PROMPTS]
    recorded.check(target, DRAFTS[name])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk_size", [1, 4, 512])
def test_context_from_chunks_and_accepted_trees(engine, target, monkeypatch, page_size, chunk_size, overlap):
    """A random draft over a small vocabulary: with a tree it is right often, and not along the first candidates."""
    parts = engine("plain", page_size)
    recorded = Recorded(monkeypatch, parts)
    harness = Harness(parts, chunk_size, overlap)
    harness.scheduler.set_envelope(fixed(3, 4))
    assert harness.run(PROMPTS, max_tokens=24, ignore_eos=True) == [greedy(target, p, 24) for p in PROMPTS]
    assert max(max(result.accept_lens) for _, result in harness.worker.steps) > 2
    recorded.check(target, DRAFTS["plain"])


@pytest.mark.parametrize("skipped", [1, 5, CATCH_UP, CATCH_UP + 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_context_from_skipped_steps(engine, target, monkeypatch, skipped, overlap):
    """Two requests that have skipped different numbers of steps, and one that has just come."""
    parts = engine("plain")
    harness = Harness(parts, overlap=overlap)
    harness.scheduler.set_envelope(fixed(0, 1))
    ids = [harness.submit(PROMPTS[0], max_tokens=60, ignore_eos=True)]
    for _ in range(3):
        harness.step()
    ids.append(harness.submit(PROMPTS[1], max_tokens=60, ignore_eos=True))
    for _ in range(skipped):
        harness.step()
    ids.append(harness.submit(PROMPTS[2], max_tokens=10, ignore_eos=True))
    recorded = Recorded(monkeypatch, parts)
    harness.scheduler.set_envelope(fixed(4, 2))
    harness.drain()
    assert [harness.answers[i].token_ids for i in ids] == [
        greedy(target, prompt, count) for prompt, count in zip(PROMPTS, (60, 60, 10), strict=True)
    ]
    recorded.check(target, DRAFTS["plain"])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("plain", [False, True])
def test_context_from_the_prefix_cache(engine, target, monkeypatch, page_size, plain):
    """What a request leaves behind is right for the draft too, even where plain steps were the last it ran."""
    parts = engine("plain", page_size)
    harness = Harness(parts)
    harness.scheduler.set_envelope(fixed(0 if plain else 3, 1))
    prompt = PROMPTS[2]
    (answer,) = harness.run([prompt], max_tokens=20, ignore_eos=True)
    recorded = Recorded(monkeypatch, parts)
    harness.scheduler.set_envelope(fixed(4, 1))
    longer = [*prompt, *answer, 5]
    request_id = harness.submit(longer, max_tokens=8, ignore_eos=True)
    harness.drain()
    assert harness.answers[request_id].token_ids == greedy(target, longer, 8)
    last = harness.answers[request_id].last
    assert last is not None
    assert last.cached_tokens >= (len(prompt) if page_size == 1 else 16)
    recorded.check(target, DRAFTS["plain"])


def test_context_after_a_retraction(engine, target, monkeypatch):
    parts = engine("plain")
    recorded = Recorded(monkeypatch, parts)
    harness = Harness(parts)
    harness.scheduler.set_envelope(fixed(4, 1))
    ids = [harness.submit(prompt, max_tokens=30, ignore_eos=True) for prompt in PROMPTS[:2]]
    for _ in range(5):
        harness.step()
    harness.scheduler.retract_latest()
    harness.drain()
    assert [harness.answers[i].token_ids for i in ids] == [greedy(target, p, 30) for p in PROMPTS[:2]]
    recorded.check(target, DRAFTS["plain"])


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Callable[[int], Parts]]:
    folder = tmp_path_factory.mktemp("copying")
    target, draft = copying_pair(PERIOD)
    target.save_pretrained(folder / "target")
    draft.save(folder / "draft")
    return target, cache(lambda page_size: load(folder / "target", "DFLASH", folder / "draft", page_size))


@pytest.mark.parametrize("disturbed", ["", "chunks", "prefix hit", "retracted", "disabled", "disabled for long"])
@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False), (16, True)])
def test_a_draft_that_is_right_is_always_accepted(copying, page_size, overlap, disturbed):
    """One that looks for each token at a certain place of the context, as the target does."""
    target, engine = copying
    harness = Harness(engine(page_size), 5 if disturbed == "chunks" else 512, overlap)
    harness.scheduler.set_envelope(fixed(4, 1))
    prompt = torch.randint(4, 24, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [prompt, prompt[5:14]]
    if disturbed == "prefix hit":
        harness.run([[*prompt, 3]], max_tokens=2)
    ids = [harness.submit(each, max_tokens=64, ignore_eos=True) for each in prompts]
    if disturbed:
        for _ in range(3):
            harness.step()
    if disturbed == "retracted":
        harness.scheduler.retract_latest()
        harness.scheduler.retract_latest()
    if disturbed.startswith("disabled"):
        harness.scheduler.set_envelope(fixed(0, 1))
        for _ in range(CATCH_UP + 3 if disturbed.endswith("long") else 7):
            harness.step()
        harness.scheduler.set_envelope(fixed(4, 1))
    harness.worker.steps.clear()
    harness.drain()
    for request_id, each in zip(ids, prompts, strict=True):
        answer = harness.answers[request_id].token_ids
        assert answer == greedy(target, each, 64)
        assert answer == (each[-PERIOD:] * 64)[:64]
    if disturbed == "prefix hit":
        last = harness.answers[ids[0]].last
        assert last is not None
        assert last.cached_tokens >= 16
    assert harness.worker.steps
    for _, result in harness.worker.steps:
        assert set(result.accept_lens) == {5}


def test_the_candidates_are_the_likeliest_products(engine):
    """Of all paths of the block's distributions the tree offers the best, each once, with its probability."""
    parts = engine("plain")
    harness = Harness(parts)
    harness.scheduler.set_envelope(fixed(3, 3))
    harness.submit(PROMPTS[0], max_tokens=30, ignore_eos=True)
    harness.step()
    proposer, rows = parts.step.proposer, parts.step.state.rows([0])
    assert isinstance(proposer, DFlashProposer)
    with torch.inference_mode():
        scores = torch.log_softmax(proposer.block_logits(rows, 3), dim=2)[0]
        offered = proposer.propose(rows, Settings(num_steps=3, topk=3, num_draft_tokens=20))
    ids, parents = offered.token_ids[0].tolist(), offered.parents[0].tolist()
    paths: dict[tuple[int, ...], float] = {}
    for number, (token, parent) in enumerate(zip(ids, parents, strict=True)):
        path = (token,) if parent < 0 else (*list(paths)[parent], token)
        assert path not in paths
        paths[path] = float(offered.scores[0, number])
        assert paths[path] == pytest.approx(sum(float(scores[d, t]) for d, t in enumerate(path)), abs=1e-5)
    for depth in range(1, 4):
        best = sorted(
            (sum(float(scores[d, t]) for d, t in enumerate(path)) for path in product(range(VOCAB), repeat=depth)),
            reverse=True,
        )
        of_depth = sorted((score for path, score in paths.items() if len(path) == depth), reverse=True)
        assert of_depth[:3] == pytest.approx(best[:3], abs=1e-5)


def test_a_block_has_an_end(engine):
    """block_size 6 and 5 tokens of the draft's own: what neither reaches is refused while it runs, too."""
    harness = Harness(engine("speculators, own vocabulary"))
    harness.scheduler.set_envelope(fixed(5, 5))
    for settings, sentence in ((fixed(6, 1), "num_steps is 6, .* at most 5"), (fixed(5, 6), "topk is 6, .* at most 5")):
        with pytest.raises(EnvelopeError, match=sentence):
            harness.scheduler.set_envelope(settings)
