"""What is trained is what serves: the target's dense pass is the paged one, and the head's own steps are its drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import CostProfile, Envelope, Settings
from pilotfish_engine.engine import assemble, schedule
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.messages import SamplingParams, Submit
from pilotfish_engine.model import Decoder, load
from pilotfish_engine.model.inputs import ForwardInputs
from pilotfish_engine.train.head import HeadSizes, TrainedHead, initialise
from pilotfish_engine.train.learning import matched
from pilotfish_engine.train.memory import Memory
from pilotfish_engine.train.publish import publish
from pilotfish_engine.train.sequences import Answered
from pilotfish_engine.train.teacher import Teacher
from pilotfish_engine.train.vocabulary import DraftVocabulary, choose
from tests.engine.model.tiny import MODELS, VARIANTS
from tests.engine.train.tiny import HIDDEN

STEPS, DRAFT_VOCAB, PAGE = 5, 20, 4


def paged(decoder: Decoder, tokens: Tensor, aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """One sequence through the engine's own pass."""
    pages = -(-len(tokens) // PAGE)
    inputs = ForwardInputs(
        token_ids=tokens,
        positions=torch.arange(len(tokens)),
        slots=PAGE + torch.arange(len(tokens)),
        attention=AttentionInputs(
            page_table=torch.arange(1, pages + 1, dtype=torch.int32)[None],
            prefix_lens=torch.zeros(1, dtype=torch.int32),
            q_indptr=torch.tensor([0, len(tokens)], dtype=torch.int32),
            tree_mask=None,
        ),
    )
    hidden, aux = decoder.forward(inputs, decoder.new_kv_cache(pages, PAGE), aux_layers)
    return hidden, torch.cat(aux, dim=-1)


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("deepseek")])
def test_the_target_s_dense_pass(name: str, tmp_path: Path) -> None:
    """Of rows of different lengths, each equal to its own pass in pages; padding behind them changes nothing."""
    MODELS[name].save_pretrained(tmp_path)
    decoder = load(tmp_path, torch.float32)
    layers = decoder.shape.num_layers
    aux = (0, 1, layers)
    teacher = Teacher(decoder, aux, torch.arange(4))
    tokens = torch.randint(0, decoder.shape.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))
    hidden, features = teacher.read(tokens)
    assert not hidden.is_inference()
    for row, length in enumerate((17, 9, 3)):
        expected, expected_features = paged(decoder, tokens[row, :length], aux)
        found = hidden.view(3, 17, -1)[row, :length]
        close = 1e-3 if name == "qwen3 next" else 1e-4  # its gated sums come out up to 3e-4 apart
        torch.testing.assert_close(found, expected, rtol=close, atol=close)
        torch.testing.assert_close(features[row, :length], expected_features, rtol=close, atol=close)


def test_the_probabilities_are_shares_of_the_whole_vocabulary(target_folder: Path) -> None:
    decoder = load(target_folder, torch.float32)
    ids = torch.tensor([3, 7, 30])
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = torch.softmax(decoder.logits(hidden), dim=1)[:, ids]
    torch.testing.assert_close(Teacher(decoder, (2, 4, 5), ids).probabilities(hidden), expected)


def test_what_is_remembered_is_what_was_read(target_folder: Path) -> None:
    """Sequences read in one batch come back in others, beside other neighbours and other padding."""
    teacher = Teacher(load(target_folder, torch.float32), (2, 4, 5), torch.arange(4))
    dice = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 30, (length,), generator=dice) for length in (5, 11, 3, 8)]
    memory = Memory(teacher, [len(one) for one in sequences], torch.device("cpu"))
    for numbers in ([0, 1], [2, 3], [1, 2], [3, 0, 1]):
        tokens = torch.nn.utils.rnn.pad_sequence([sequences[number] for number in numbers], batch_first=True)
        hidden, features = memory.read(numbers, tokens)
        expected, expected_features = teacher.read(tokens)
        for row, number in enumerate(numbers):
            whole = slice(0, len(sequences[number]))
            for found, right in ((hidden, expected), (features, expected_features)):
                pairs = (x.view(*tokens.shape, -1)[row, whole] for x in (found, right))
                torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_and_its_gradient_are_autograd_s(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(6)
    rows, says = (torch.randn(size, HIDDEN, generator=dice, dtype=dtype, requires_grad=True) for size in (7, 20))
    wanted = torch.rand(7, 20, generator=dice, dtype=dtype) / 20
    weights = torch.rand(7, generator=dice)
    loss = 3 * matched(rows, says, wanted, weights)
    loss.backward()
    found = [rows.grad, says.grad]
    rows.grad = says.grad = None
    each = torch.nn.functional.cross_entropy(rows @ says.T, wanted, reduction="none")
    expected = 3 * (weights * each).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, [rows.grad, says.grad])


@pytest.fixture(scope="module")
def trained(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, TrainedHead, Path]:
    """A head with weights that matter everywhere, and its checkpoint with these weights in bfloat16."""
    decoder = load(target_folder, torch.float32)
    shape = decoder.shape
    vocabulary = DraftVocabulary(torch.arange(0, 2 * DRAFT_VOCAB, 2) + 3, 1.0)
    head = TrainedHead(HeadSizes.beside(shape, DRAFT_VOCAB))
    initialise(head, decoder, vocabulary.token_ids, torch.ones(1, 3 * HIDDEN), seed=3)
    dice = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=dice) * (0.3 if parameter.dim() == 1 else HIDDEN**-0.5)
            parameter.copy_((parameter + noise).bfloat16())
    out = tmp_path_factory.mktemp("head")
    publish(out, head, vocabulary, shape)
    return decoder, head, out


def unrolled(decoder: Decoder, head: TrainedHead, tokens: Tensor, steps: int) -> Tensor:
    """Log-probabilities [steps, T, draft vocabulary] by root."""
    teacher = Teacher(decoder, (2, 4, 5), torch.arange(1))
    _, features = teacher.read(tokens[None])
    with torch.no_grad():
        outs = list(head.unroll(features, tokens[None], decoder.embed.weight, steps))
        return torch.stack([torch.log_softmax(head.lm_head(out[0]), dim=-1) for out in outs])


@pytest.mark.parametrize("prompt_len", [1, 2, 9, 22])
def test_each_step_is_what_the_engine_drafts(
    trained: tuple[Decoder, TrainedHead, Path], target_folder: Path, prompt_len: int
) -> None:
    """A prompt goes through the engine; the scores of the chain that it then proposes are those of training-time test
    over the same tokens, from the same root."""
    decoder, head, out = trained
    config = EngineConfig(
        model=ModelConfig(str(target_folder), "float32"),
        speculation=SpeculationConfig("EAGLE3", str(out), Envelope(num_steps=STEPS, num_draft_tokens=STEPS + 1)),
        capacity=CapacityConfig(max_running_requests=2, page_size=PAGE, chunk_size=16),
    )
    parts = assemble(config, CostProfile(verify_ms=((1, 1.0),)))
    scheduler = schedule(config, parts, parts.worker)
    prompt = torch.randint(0, 30, (prompt_len,), generator=torch.Generator().manual_seed(prompt_len)).tolist()
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    scheduler.submit(Submit(request_id="a", prompt=prompt, params=params))
    scheduler._admit()
    while int(parts.step.state.seq_lens.max()) < prompt_len:
        scheduler._extend()
    row = int(parts.step.state.seq_lens.argmax())
    assert parts.step.proposer is not None
    settings = Settings(num_steps=STEPS, topk=1, num_draft_tokens=STEPS + 1)
    rows = parts.step.state.rows([row])
    with torch.inference_mode():
        candidates = parts.step.proposer.propose(rows, settings)
    drafted = candidates.token_ids[0].tolist()
    known = parts.step.state.tokens[row, : prompt_len + 1].tolist()
    assert known[:prompt_len] == prompt
    scores = unrolled(decoder, head, torch.tensor(known + drafted), STEPS)
    # the engine drafts no row that the target's tokenizer has no token for
    has_token = torch.arange(3, 2 * DRAFT_VOCAB + 3, 2) < parts.step.state.vocab_size
    scores = torch.log_softmax(scores.masked_fill(~has_token, -torch.inf), dim=-1)
    root = prompt_len - 1
    d2t = {token: number for number, token in enumerate(range(3, 2 * DRAFT_VOCAB + 3, 2))}
    expected = [float(scores[step, root, d2t[token]]) for step, token in enumerate(drafted)]
    found = candidates.scores[0]
    torch.testing.assert_close(found, torch.tensor(expected).cumsum(0), rtol=1e-4, atol=1e-4)
    assert [int(scores[step, root].argmax()) for step in range(STEPS)] == [d2t[token] for token in drafted]


def test_what_comes_later_is_not_seen(trained: tuple[Decoder, TrainedHead, Path]) -> None:
    """The logits of a root at a step depend on no token behind the last one that this step has read."""
    decoder, head, _ = trained
    tokens = torch.randint(0, 30, (14,), generator=torch.Generator().manual_seed(8))
    whole = unrolled(decoder, head, tokens, STEPS)
    for root in (0, 5, 8):
        for step in range(STEPS):
            changed = tokens.clone()
            changed[root + 2 + step :] = (changed[root + 2 + step :] + 1) % 30
            found = unrolled(decoder, head, changed, STEPS)[step, root]
            torch.testing.assert_close(found, whole[step, root], rtol=1e-5, atol=1e-5)


def test_the_vocabulary_is_the_most_frequent_tokens() -> None:
    answers = [Answered([9, 9, 9, 5, 5, 7, 2], 3), Answered([1, 5, 7, 7, 4], 1)]
    found = choose(answers, 3, vocab_size=12)
    assert found.token_ids.tolist() == [2, 5, 7]
    assert found.coverage == 7 / 8
    d2t, t2d = found.maps(12)
    assert (d2t + torch.arange(3)).tolist() == [2, 5, 7]
    assert t2d.nonzero().flatten().tolist() == [2, 5, 7]
    assert choose(answers, 50, vocab_size=12).token_ids.tolist() == list(range(12))
