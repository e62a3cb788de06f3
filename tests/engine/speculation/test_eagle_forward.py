"""Heads of every checkpoint format, loaded by the engine, against a forward in plain torch over whole sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model import Decoder, load, read_shape
from pilotfish_engine.model.eagle import Head, load_head
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.speculation import eagle, eagle3
from pilotfish_engine.speculation.proposer import Models, TargetHidden
from tests.engine.speculation import eagle_heads as reference
from tests.engine.speculation.eagle_formats import FORMATS
from tests.engine.speculation.eagle_heads import LAYERS, VOCAB

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

MODULES = {"eagle": eagle, "eagle3": eagle3}
LENGTH, ROWS, PAGE = 21, 64, 4
MAX_POSITIONS = 150  # more than any of the configs says


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return reference.target_model()


@pytest.fixture(scope="module")
def folder(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    target.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load(folder, torch.float32)


def states(target: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What the reference library's target leaves: final hidden states, and the residual stream at the input of every
    layer and behind the last."""
    last: list[Tensor] = []
    handle = target.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    with torch.inference_mode():
        hidden = target.model(tokens[None], output_hidden_states=True).hidden_states
    handle.remove()
    return hidden[-1][0], [*(state[0] for state in hidden[:-1]), last[0][0]]


def features_of(head: reference.Head, target: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    final, inputs = states(target, tokens)
    return torch.cat([inputs[layer] for layer in head.aux], dim=-1) if head.aux else final


class Rows:
    """The pages of one request, in random order, and NaN wherever nothing was written."""

    def __init__(self, head: Head) -> None:
        self.kv: KVCache = head.new_kv_cache(ROWS // PAGE, PAGE)
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        self.table = torch.randperm(ROWS // PAGE, generator=torch.Generator().manual_seed(3)).int()[None] + 1

    def inputs(self, tokens: Tensor, positions: Tensor, first: int, prefix: int, masks: list[int] | None = None):
        rows = first + torch.arange(len(tokens))
        return ForwardInputs(
            token_ids=tokens,
            positions=positions,
            slots=self.table[0, rows // PAGE].long() * PAGE + rows % PAGE,
            attention=AttentionInputs(
                page_table=self.table,
                prefix_lens=torch.tensor([prefix], dtype=torch.int32),
                q_indptr=torch.tensor([0, len(tokens)], dtype=torch.int32),
                tree_mask=None if masks is None else torch.tensor(masks),
            ),
        )


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5 * max(1.0, float(expected.abs().max())))


@pytest.fixture(scope="module", params=FORMATS)
def pair(
    request: pytest.FixtureRequest,
    target: LlamaForCausalLM,
    folder: Path,
    decoder: Decoder,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[reference.Head, Head]:
    """A head as written, and as the engine has checked and loaded it."""
    written = FORMATS[request.param](target)
    path = written.write(tmp_path_factory.mktemp("head"))
    models = Models(folder, read_shape(folder), path, lambda other, size: None)
    module = MODULES[written.kind]
    assert module.recognises(models)
    assert module.check(models).misfit(Envelope(num_steps=8, topk=8, num_draft_tokens=64)) is None
    return written, load_head(path, decoder, torch.float32, MAX_POSITIONS)


@pytest.mark.parametrize("pieces", [(20,), (7, 12, 1), (1,) * 20], ids=["whole", "chunks", "steps"])
def test_a_sequence(pair: tuple[reference.Head, Head], target: LlamaForCausalLM, pieces: tuple[int, ...]) -> None:
    written, head = pair
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(5))
    features = features_of(written, target, tokens)[:-1]
    hidden = reference.combined(written, features)
    positions, causal = torch.arange(LENGTH - 1), torch.ones(LENGTH - 1, LENGTH - 1).tril().bool()
    expected = reference.forward(written, hidden, tokens[1:], positions, causal)
    rows, start = Rows(head), 0
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for count in pieces:
        span = slice(start, start + count)
        inputs = rows.inputs(tokens[1:][span], positions[span], first=start, prefix=start)
        read = head.combine(features[span])
        before = read.clone()
        out, recurs = head.forward(read, inputs, rows.kv)
        assert torch.equal(read, before), "the caller may still need it"
        found.append((head.logits(out), out, recurs))
        start += count
    for part, whole in zip(zip(*found, strict=True), expected, strict=True):
        close(torch.cat(part), whole)


# nodes of each depth with their parents in the depth before; the root is the last row of the prompt
TREE = ([0, 0], [0, 0, 1], [2, 0])


def test_steps_of_a_tree(pair: tuple[reference.Head, Head], target: LlamaForCausalLM) -> None:
    """Every depth reads what recurs at its parents, sees the prompt and its ancestors, and nothing else."""
    written, head = pair
    generator = torch.Generator().manual_seed(6)
    prompt = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
    known = LENGTH - 1
    features = features_of(written, target, prompt)[:-1]
    hidden, tokens = reference.combined(written, features), prompt[1:]
    positions, visible = torch.arange(known), torch.ones(known, known).tril().bool()
    _, _, recurs = reference.forward(written, hidden, tokens, positions, visible)
    rows = Rows(head)
    _, given = head.forward(head.combine(features), rows.inputs(tokens, positions, 0, 0), rows.kv)
    above, given = [known - 1], given[-1:]
    for depth, parents in enumerate(TREE):
        drawn = torch.randint(0, VOCAB, (len(parents),), generator=generator)
        first = len(tokens)
        new = [above[parent] for parent in parents]
        grown = torch.zeros(first + len(new), first + len(new), dtype=torch.bool)
        grown[:first, :first] = visible
        for row, parent in enumerate(new, start=first):
            grown[row] = grown[parent]
            grown[row, row] = True
        visible, tokens = grown, torch.cat((tokens, drawn))
        hidden, positions = torch.cat((hidden, recurs[new])), torch.cat((positions, positions[new] + 1))
        logits, out, recurs = reference.forward(written, hidden, tokens, positions, visible)
        masks = [sum(1 << int(j) for j in row.nonzero().flatten()) for row in visible[first:, known:]]
        inputs = rows.inputs(drawn, positions[first:], first, known, masks)
        found, given = head.forward(given[parents], inputs, rows.kv)
        close(head.logits(found), logits[first:])
        close(found, out[first:])
        close(given, recurs[first:])
        assert inputs.positions.unique().tolist() == [known + depth]
        above = list(range(first, first + len(new)))


def test_the_target_s_states(pair: tuple[reference.Head, Head], target: LlamaForCausalLM, decoder: Decoder) -> None:
    """The engine's own target gives the head what the reference library's layers hold."""
    written, head = pair
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(7))
    pages = -(-LENGTH // PAGE)
    kv = decoder.new_kv_cache(pages, PAGE)
    inputs = ForwardInputs(
        token_ids=tokens,
        positions=torch.arange(LENGTH),
        slots=PAGE + torch.arange(LENGTH),
        attention=AttentionInputs(
            page_table=torch.arange(1, pages + 1, dtype=torch.int32)[None],
            prefix_lens=torch.zeros(1, dtype=torch.int32),
            q_indptr=torch.tensor([0, LENGTH], dtype=torch.int32),
            tree_mask=None,
        ),
    )
    hidden, aux = decoder.forward(inputs, kv, head.aux_layers)
    features = head.features(TargetHidden(hidden, tuple(aux)))
    assert features.shape == (LENGTH, head.feature_size)
    close(features, features_of(written, target, tokens))


def test_its_vocabulary(pair: tuple[reference.Head, Head]) -> None:
    written, head = pair
    ids = torch.tensor([[0, 3], [head.vocab_size - 1, 3]])
    expected = ids if written.map is None else written.map[ids]
    assert torch.equal(head.target_ids(ids), expected)
    assert head.logits(torch.zeros(2, written.layers.hidden_size)).shape == (2, head.vocab_size)


def test_rotary_tables_reach_the_engine_s_context(pair: tuple[reference.Head, Head]) -> None:
    """…past what the head's own config says."""
    written, head = pair
    position = torch.tensor([MAX_POSITIONS - 2])
    hidden, token = torch.randn(1, written.layers.hidden_size), torch.tensor([4])
    expected, _, _ = reference.forward(written, hidden, token, position, torch.ones(1, 1).bool())
    rows = Rows(head)
    out, _ = head.forward(hidden, rows.inputs(token, position, 0, 0), rows.kv)
    close(head.logits(out), expected)


def test_bfloat16(target: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    """Every part holds the dtype that was asked for, and rounding is all that changes."""
    coarse = load(folder, torch.bfloat16)
    written = FORMATS["EAGLE-3.1"](target)
    head = load_head(written.write(tmp_path), coarse, torch.bfloat16, 64)
    tokens, positions = torch.tensor([4, 9, 30]), torch.arange(3)
    hidden = torch.randn(3, written.layers.hidden_size, generator=torch.Generator().manual_seed(9)).bfloat16()
    rows = Rows(head)
    out, recurs = head.forward(hidden, rows.inputs(tokens, positions, 0, 0), rows.kv)
    assert {out.dtype, recurs.dtype, rows.kv.k.dtype} == {torch.bfloat16}
    expected, _, _ = reference.forward(written, hidden.float(), tokens, positions, torch.ones(3, 3).tril().bool())
    logits = head.logits(out)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.03 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("ids", "inputs"),
    [
        (None, (2, LAYERS // 2, LAYERS - 3)),
        ([], (2, LAYERS // 2, LAYERS - 3)),
        ([2, 4, 5], (2, 4, 5)),
        ([1, 3, 4], (2, 4, 5)),  # by outputs
        ([1, 3, LAYERS - 1], (2, 4, LAYERS)),  # the output of the last layer
        ([0, 4, LAYERS], (0, 4, LAYERS)),  # the embedding, and what leaves the last layer
    ],
)
def test_both_conventions_of_layer_ids(
    ids: list[int] | None, inputs: tuple[int, ...], target: LlamaForCausalLM, decoder: Decoder, tmp_path: Path
) -> None:
    reference.eagle3(target, eagle_aux_hidden_state_layer_ids=ids).write(tmp_path)
    assert load_head(tmp_path, decoder, torch.float32, 64).aux_layers == inputs


def test_only_heads_are_recognised(target: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    """Auto asks every method; none of the two takes the other's, a whole model, or another library's draft."""

    def methods(path: Path) -> list[str]:
        models = Models(folder, read_shape(folder), path, lambda other, size: None)
        kinds = ("eagle", "eagle3")
        modules = [MODULES[kind] for kind in kinds]
        return [kind for kind, module in zip(kinds, modules, strict=True) if module.recognises(models)]

    assert methods(reference.eagle(target).write(tmp_path / "a")) == ["eagle"]
    assert methods(reference.eagle3(target).write(tmp_path / "b")) == ["eagle3"]
    assert methods(folder) == []
    assert methods(tmp_path / "absent") == []
    broken = reference.eagle3(target).write(tmp_path / "d")
    (broken / "model.safetensors").write_bytes(b"broken")
    assert methods(broken) == ["eagle3"], "so that what is wrong with it is said"
    parallel = reference.as_speculators(reference.eagle3(target), "peagle")
    assert methods(parallel.write(tmp_path / "c")) == []


def test_an_unreadable_head_is_an_error(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such head; a folder"):
        load_head(tmp_path / "absent", decoder, torch.float32, 64)
