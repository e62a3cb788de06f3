"""`python -m benchmarks.ngram`: how many tokens a step n-gram drafts give over texts that are there already.

Answers are followed token by token (teacher forcing), 16 requests at a time, with the engine's own matcher, tree and
verifier but no model: so the numbers are the same on every machine, and no time is taken. Texts: HumanEval problems
with their functions, GSM8K questions with their answers, MT-bench questions with GPT-4's answers. `+ corpus`: with the
answers to the other half of the same questions as a corpus.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import prompts
from benchmarks.reference import SOURCE
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.source import resolve
from pilotfish_engine.speculation import ngram_corpus, ngram_matcher
from pilotfish_engine.speculation.tree import cut
from pilotfish_engine.speculation.verify import verify
from pilotfish_engine.tokenizer import Tokenizer, load

BATCH = 16
SETTINGS = [
    Settings(num_steps=num_steps, topk=topk, num_draft_tokens=nodes)
    for num_steps, topk, nodes in [(4, 1, 5), (8, 1, 9), (4, 2, 8), (4, 4, 8), (4, 2, 16), (4, 4, 16), (8, 4, 16)]
]
Text = tuple[list[int], int]  # the tokens of question and answer, and how many of them are the question's


def tokens_per_step(texts: Sequence[Text], settings: Settings, corpus: ngram_matcher.Corpus | None) -> tuple[int, int]:
    """(tokens, steps) over all answers but for their first tokens, which come from the prompt's own pass."""
    tokens = steps = 0
    for begin in range(0, len(texts), BATCH):
        batch = texts[begin : begin + BATCH]
        longest = max(len(text) for text, _ in batch)
        known = torch.full((len(batch), longest + settings.num_steps + 1), ngram_matcher.NONE)
        for row, (text, _) in enumerate(batch):
            known[row, : len(text)] = torch.tensor(text)
        ends = torch.tensor([len(text) - 1 for text, _ in batch])
        seq_lens = torch.tensor([asked for _, asked in batch])
        while bool((seq_lens < ends).any()):
            rows = (seq_lens < ends).nonzero().flatten()
            at = seq_lens[rows]
            candidates = ngram_matcher.drafts(known, seq_lens, rows, settings.topk, settings.num_steps, corpus)
            tree = cut(known[rows, at], candidates, settings.num_draft_tokens, settings.num_steps)
            target_ids = known[rows.unsqueeze(1), at.unsqueeze(1) + tree.depth + 1]
            gained = torch.minimum(verify(tree, target_ids, settings.num_steps).accept_lens, ends[rows] - at)
            seq_lens[rows] += gained
            tokens, steps = tokens + int(gained.sum()), steps + len(rows)
    return tokens, steps


def encoded(tokenizer: Tokenizer, question: str, answer: str) -> Text:
    asked = tokenizer.encode_chat([{"role": "user", "content": question}])
    return asked + tokenizer.encode(answer), len(asked)


def main() -> None:
    tokenizer = load(resolve(SOURCE))
    heads = [f"{'chain' if s.topk == 1 else f'topk {s.topk}'} k={s.num_steps} m={s.num_draft_tokens}" for s in SETTINGS]
    print(f"{'tokens a step':18}" + "".join(f"{head:>16}" for head in heads))
    for name, pairs in prompts.answered().items():
        halves = [pairs[0::2], pairs[1::2]]
        corpora = [
            ngram_corpus.index([answer for _, answer in half], tokenizer.encode, torch.device("cpu")) for half in halves
        ]
        texts = [[encoded(tokenizer, *pair) for pair in half] for half in halves]
        for with_corpus in (False, True):
            row = ""
            for settings in SETTINGS:
                counts = [
                    tokens_per_step(half, settings, corpus if with_corpus else None)
                    for half, corpus in zip(texts, reversed(corpora), strict=True)
                ]
                row += f"{sum(tokens for tokens, _ in counts) / sum(steps for _, steps in counts):>16.3f}"
            print(f"{name + (' + corpus' if with_corpus else ''):18}{row}", flush=True)


if __name__ == "__main__":
    main()
