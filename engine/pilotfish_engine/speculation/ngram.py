"""N-gram drafts: the tokens that followed the same n-gram earlier in the request's own prompt and answer, or in a
corpus given at the start. No model, no KV, and nothing kept by row: a step searches the known tokens as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.methods import Limits
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.errors import MethodError
from pilotfish_engine.speculation import ngram_corpus, ngram_matcher, ngram_tensors
from pilotfish_engine.speculation.proposer import Models, ProposerContext, TargetHidden
from pilotfish_engine.speculation.tree import Candidates
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.types import Chunk


class NgramProposer:
    """Reads the known tokens where the state keeps them: in C++ on a CPU, else as tensor code on the state's device."""

    aux_layers: tuple[int, ...] = ()
    lookahead = 0

    def __init__(self, state: RequestState, corpus: ngram_matcher.Corpus | None = None) -> None:
        self._state = state
        self._corpus = corpus
        self._on_cpu = state.device.type == "cpu"
        if self._on_cpu:
            ngram_matcher.load()

    def slots_needed(self, settings: Settings) -> int:
        return 0

    def admit(self, row: int, cached_len: int) -> None:
        pass

    def extend(self, chunks: Sequence[Chunk], target: TargetHidden) -> None:
        pass

    def due(self, rows: Rows, settings: Settings) -> list[int] | None:
        return None

    def catch_up(self, rows: Rows, counts: torch.Tensor, width: int) -> None:
        pass

    def propose(self, rows: Rows, settings: Settings) -> Candidates:
        drafts = ngram_matcher.drafts if self._on_cpu else ngram_tensors.drafts
        state = self._state
        return drafts(state.tokens, state.seq_lens, rows.index, settings.topk, settings.num_steps, self._corpus)

    def accepted(self, rows: Rows, settings: Settings, verdict: Verdict, target: TargetHidden) -> None:
        pass

    def skipped(self, rows: Rows, target: TargetHidden) -> None:
        pass

    def reusable_len(self, row: int, seq_len: int) -> int:
        return seq_len


def recognises(models: Models) -> bool:
    return True


def check(models: Models) -> Limits:
    if models.corpus is None:
        return Limits()
    ngram_corpus.read(models.corpus)
    if models.tokenizer() is None:
        raise MethodError(
            f"the corpus {models.corpus} is text, and the target {models.target.name} comes without a tokenizer; "
            "leave the corpus out, or give a checkpoint with one"
        )
    return Limits()


def build(context: ProposerContext) -> NgramProposer:
    models, state = context.models, context.state
    if models.corpus is None:
        return NgramProposer(state)
    tokenizer = models.tokenizer()
    assert tokenizer is not None, "check has seen one"

    def encode(text: str) -> list[int]:
        return [token if token < state.vocab_size else ngram_matcher.NONE for token in tokenizer.encode(text)]

    corpus = ngram_corpus.index(ngram_corpus.read(models.corpus), encode, state.device)
    return NgramProposer(state, corpus)
