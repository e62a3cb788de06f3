"""What several heads in a row draft, whatever happened before, is what they draft over the whole sequence at once, in
the paper's order: heads of a few random matrices, with an attention of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.speculation import PLAIN, Settings
from pilotfish_engine.kernels import reference
from pilotfish_engine.messages import SamplingParams
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.speculation.multilayer_mtp import MultiLayerProposer
from pilotfish_engine.speculation.proposer import TargetHidden
from pilotfish_engine.speculation.unread import CATCH_UP
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.types import Admission, Chunk

VOCAB, HIDDEN, ROWS, PAGE, MAX_LEN = 50, 8, 3, 4, 120
TURN = torch.arange(MAX_LEN + 20, dtype=torch.float64).unsqueeze(1) * torch.tensor([0.3, 0.01, 1.0, 0.1, 2.0, 0, 0, 0])


def matrices(count: int, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, rows, columns, generator=generator, dtype=torch.float64) / columns**0.5


EMBED = matrices(1, VOCAB, HIDDEN, 1)[0] * 3
LM_HEAD = matrices(1, VOCAB, HIDDEN, 2)[0]


@dataclass(frozen=True)
class Weights:
    """Of one head. Scores of row i for row r: x_i · query · (key · x_r), turned by the positions."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor

    @staticmethod
    def of(head: int) -> Weights:
        parts = matrices(4, HIDDEN, 2 * HIDDEN, 100 + head)
        return Weights(parts[0] * 2, parts[1] * 2, parts[2] * 2, parts[3])

    def whole(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The head over a whole sequence: hidden [n, H] of rows 0 … n − 1, the token beside each → [n, H]."""
        x = torch.cat([hidden, EMBED[token_ids]], dim=1)
        turn = TURN[: len(x)].cos()
        scores = (x @ self.query.T * turn) @ (x @ self.key.T * turn).T
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        return torch.tanh(scores.softmax(dim=1) @ (x @ self.value.T) + x @ self.out.T)


@dataclass(frozen=True)
class PagedHead:
    weights: Weights

    def forward(self, hidden: Tensor, inputs: ForwardInputs, kv: KVCache, index: int) -> Tensor:
        w, x = self.weights, torch.cat([hidden, EMBED[inputs.token_ids]], dim=1)
        turn = TURN[inputs.positions].cos()
        kv.k[index].index_copy_(0, inputs.slots, (x @ w.key.T * turn).unsqueeze(1))
        kv.v[index].index_copy_(0, inputs.slots, (x @ w.value.T).unsqueeze(1))
        q = (x @ w.query.T * turn).unsqueeze(1)
        attended = reference.paged_attention(q, kv.k[index], kv.v[index], kv.page_size, inputs.attention, 1.0)
        return torch.tanh(attended.squeeze(1) + x @ w.out.T)


def target_hidden(tokens: Sequence[int]) -> Tensor:
    """[n, H]: depends on each token before and at a position."""
    state, states = torch.zeros(HIDDEN, dtype=torch.float64), []
    for token in tokens:
        state = torch.tanh(0.7 * state.roll(1) + EMBED[token])
        states.append(state)
    return torch.stack(states)


@dataclass
class Run:
    """Rows under way, with their known tokens. Everything unused in the pools is NaN."""

    num_heads: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    dice: random.Random = field(default_factory=lambda: random.Random(5))

    def __post_init__(self) -> None:
        pages = MAX_LEN // PAGE
        self.weights = [Weights.of(head) for head in range(self.num_heads)]
        self.state = RequestState(ROWS, MAX_LEN - 16, PAGE, 16, VOCAB, torch.device("cpu"))
        size = (self.num_heads, (ROWS * pages + 1) * PAGE, 1, HIDDEN)
        kv = KVCache(torch.full(size, torch.nan).double(), torch.full(size, torch.nan).double(), PAGE)
        target = SimpleNamespace(
            shape=SimpleNamespace(hidden_size=HIDDEN), dtype=torch.float64, logits=lambda hidden: hidden @ LM_HEAD.T
        )
        heads = [PagedHead(weights) for weights in self.weights]
        self.proposer = MultiLayerProposer(heads, kv, cast(Decoder, target), self.state)

    def admit(self, row: int, tokens: Sequence[int], cached_len: int = 0, shared: Sequence[int] = ()) -> None:
        pages = MAX_LEN // PAGE
        own = [*shared, *range(1 + row * pages + len(shared), 1 + (row + 1) * pages)]
        self.state.admit(Admission(row, tokens, cached_len, own, SamplingParams(max_tokens=1, temperature=0), 0))
        self.proposer.admit(row, cached_len)
        self.tokens[row] = list(tokens)

    def extend(self, *spans: tuple[int, int, int]) -> None:
        """(row, start, end) each: chunks of the prompts; the one that ends a prompt brings the next token."""
        chunks = [Chunk(row, start, end, last=end == len(self.tokens[row])) for row, start, end in spans]
        hidden = torch.cat([target_hidden(self.tokens[row])[start:end] for row, start, end in spans])
        for chunk in chunks:
            if chunk.last:
                self.tokens[chunk.row].append(self.dice.randrange(VOCAB))
                self.state.tokens[chunk.row, chunk.end] = self.tokens[chunk.row][-1]
            self.state.seq_lens[chunk.row] = chunk.end
        self.proposer.extend(chunks, TargetHidden(hidden, ()))

    def prefill(self, row: int, tokens: Sequence[int], chunk: int = 1000) -> None:
        self.admit(row, tokens)
        for start in range(0, len(tokens), chunk):
            self.extend((row, start, min(start + chunk, len(tokens))))

    def expected(self, row: int, num_steps: int) -> tuple[list[int], list[float]]:
        """Drafted ids, and the log-probability of the path to each, by whole passes over all rows."""
        tokens = list(self.tokens[row])
        last = len(tokens) - 1
        hidden, drafted, scores = target_hidden(tokens[:-1]), list[int](), list[float]()
        for number in range(num_steps):
            beside = torch.tensor(tokens[number + 1 : number + 1 + last])
            hidden = self.weights[number].whole(hidden, beside)
            logits = torch.log_softmax(hidden[-1] @ LM_HEAD.T, dim=0)
            drafted.append(int(logits.argmax()))
            scores.append(float(logits.max()) + (scores[-1] if scores else 0.0))
            tokens.append(drafted[-1])
        return drafted, scores

    def catch_up(self, rows: Sequence[int], settings: Settings) -> None:
        members = self.state.rows(rows)
        counts = self.proposer.due(members, settings)
        if counts is not None:
            self.proposer.catch_up(members, torch.tensor(counts), max(counts))

    def propose(self, rows: Sequence[int], num_steps: int) -> None:
        settings = Settings(num_steps=num_steps, topk=1, num_draft_tokens=num_steps + 1)
        self.catch_up(rows, settings)
        found = self.proposer.propose(self.state.rows(rows), settings)
        assert found.parents.tolist() == [list(range(-1, num_steps - 1))] * len(rows)
        for i, row in enumerate(rows):
            ids, scores = self.expected(row, num_steps)
            assert found.token_ids[i].tolist() == ids, f"row {row} of {len(self.tokens[row])} tokens"
            torch.testing.assert_close(found.scores[i], torch.tensor(scores, dtype=torch.float64))

    def commit(self, rows: Sequence[int], counts: Sequence[int], num_steps: int) -> None:
        """A step in which row i commits counts[i] ≤ num_steps + 1 tokens; num_steps 0: a plain one."""
        width, members = num_steps + 1, self.state.rows(rows)
        if num_steps == 0:
            self.catch_up(rows, PLAIN)
        hidden = torch.full((len(rows) * width, HIDDEN), torch.nan, dtype=torch.float64)
        committed = torch.zeros(len(rows), width, dtype=torch.int64)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            known = len(self.tokens[row])
            self.tokens[row] += [self.dice.randrange(VOCAB) for _ in range(count)]
            committed[i, :count] = torch.tensor(self.tokens[row][known:])
            hidden[i * width : i * width + count] = target_hidden(self.tokens[row])[known - 1 : known - 1 + count]
        lens = torch.tensor(counts)
        self.state.commit(members, committed, lens)
        target = TargetHidden(hidden, ())
        if num_steps == 0:
            self.proposer.skipped(members, target)
            return
        path = torch.arange(width).expand(len(rows), width)
        path = torch.where(path < lens.unsqueeze(1), path, 0)
        flat = path + width * torch.arange(len(rows)).unsqueeze(1)
        settings = Settings(num_steps=num_steps, topk=1, num_draft_tokens=width)
        self.proposer.accepted(members, settings, Verdict(committed, lens, path, flat), target)

    def prompt(self, length: int) -> list[int]:
        return [self.dice.randrange(VOCAB) for _ in range(length)]


HEADS = [1, 2, 3, 5]


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 17])
def test_after_a_prompt(num_heads: int, chunk: int, length: int) -> None:
    run = Run(num_heads)
    run.prefill(0, run.prompt(length), chunk)
    for num_steps in range(1, num_heads + 1):
        run.propose([0], num_steps)


def test_chunks_of_several_prompts_at_once() -> None:
    run = Run(3)
    for row, length in enumerate((9, 3, 7)):
        run.admit(row, run.prompt(length))
    run.extend((0, 0, 4), (1, 0, 1), (2, 0, 7))
    run.extend((1, 1, 3), (0, 4, 9))
    run.propose([2, 0, 1], 3)


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("length", [1, 3, 12])
def test_after_every_count_of_accepted_tokens(num_heads: int, length: int) -> None:
    """Each count follows each other one, in two rows that never accept alike."""
    run = Run(num_heads)
    run.prefill(0, run.prompt(length))
    run.prefill(1, run.prompt(length + 2))
    counts = range(1, num_heads + 2)
    for first in counts:
        for second in counts:
            for count in (first, second):
                run.propose([1, 0], num_heads)
                run.commit([1, 0], [count, num_heads + 2 - count], num_heads)
            if max(len(tokens) for tokens in run.tokens.values()) > MAX_LEN - 40:
                for row in (0, 1):
                    run.prefill(row, run.prompt(length))
    run.propose([0, 1], num_heads)


@pytest.mark.parametrize("skipped", [1, 2, 5, CATCH_UP - 1, CATCH_UP, CATCH_UP + 3])
@pytest.mark.parametrize("num_heads", [2, 4])
def test_after_plain_steps(num_heads: int, skipped: int) -> None:
    """Row 1 joins in half of them, row 2 in none."""
    run = Run(num_heads)
    for row, length in enumerate((1, 6, 4)):
        run.prefill(row, run.prompt(length))
    for number in range(skipped):
        rows = [0, 1] if number % 2 else [0]
        run.commit(rows, [1] * len(rows), 0)
    run.propose([0, 1, 2], num_heads)
    run.commit([0, 1, 2], [1, 2, num_heads + 1], num_heads)
    run.propose([2, 1, 0], num_heads)


@pytest.mark.parametrize("num_heads", [2, 3, 5])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_after_a_prefix_hit(num_heads: int, chunk: int) -> None:
    """Pages are shared as far as every token that their rows depend on is the same."""
    run = Run(num_heads)
    first = run.prompt(21)
    run.prefill(0, first)
    run.propose([0], num_heads)
    assert run.proposer.lookahead == num_heads
    pages = (21 - run.proposer.lookahead) // PAGE
    assert run.proposer.reusable_len(0, 21) >= pages * PAGE
    shortest = first[: pages * PAGE + run.proposer.lookahead]
    for tokens in (shortest, first + run.prompt(1), first + run.prompt(6)):
        shared = [int(page) for page in run.state.page_table[0, :pages]]
        run.admit(1, tokens, pages * PAGE, shared)
        known = len(run.tokens[1])
        for start in range(pages * PAGE, known, chunk):
            run.extend((1, start, min(known, start + chunk)))
        run.propose([0, 1], num_heads)  # the one who owns them still drafts as before, too
        run.commit([0, 1], [1, 2], num_heads)
        run.propose([1, 0], num_heads)


def test_only_final_rows_are_reusable() -> None:
    run = Run(3)
    run.prefill(0, run.prompt(10))
    assert run.proposer.reusable_len(0, 10) == 8
    run.commit([0], [1], 0)
    assert run.proposer.reusable_len(0, 11) == 8
    run.propose([0], 1)
    assert run.proposer.reusable_len(0, 11) == 9
    run.prefill(1, run.prompt(1))
    assert run.proposer.reusable_len(1, 1) == 0


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_everything(seed: int) -> None:
    run = Run(3, dice=random.Random(seed))
    dice = run.dice

    def speculate(rows: list[int]) -> None:
        num_steps = dice.randint(1, 3)
        run.propose(rows, num_steps)
        run.commit(rows, [dice.randint(1, num_steps + 1) for _ in rows], num_steps)

    def plain(rows: list[int]) -> None:
        run.commit(rows, [1] * len(rows), 0)

    actions: list[Callable[[list[int]], Any]] = [speculate, plain]
    for _ in range(60):
        for row in range(ROWS):
            if row not in run.tokens or len(run.tokens[row]) > MAX_LEN - 30:
                run.prefill(row, run.prompt(dice.randint(1, 9)), dice.choice((1, 2, 100)))
        dice.choice(actions)(dice.sample(range(ROWS), dice.randint(1, ROWS)))
