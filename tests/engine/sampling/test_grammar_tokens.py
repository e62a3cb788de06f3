"""Grammars over the vocabularies of the families: whatever tokens the masks allow, their text is what was asked for."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from pilotfish_engine.messages import Grammar
from pilotfish_engine.sampling.grammar import Grammars
from pilotfish_engine.tokenizer import Detokenizer, load
from tests.engine.sampling.masks import masks
from tests.engine.tokenizer.families import FAMILIES, save_folder

EXPRESSIONS = [
    "[你好世界]{1,4}。",
    "(မင်္ဂလာ|ကမ္ဘာ) ",
    " ?the [а-яё]{1,4}",
    "  x\n\n\ny",
    "e\u0301 ﬁ ½",  # decomposed: Qwen's vocabularies compose what is written
    "<s>|</s>|<\\|im_end\\|>",  # names of special tokens, as text
    "👩‍👩‍👧‍👦(🤷‍♀️)?",
    "\u2581a|\ufffdb",
]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "unigram"])  # it has no single bytes
def test_texts_that_masks_lead_to_are_of_the_grammar(tmp_path: Path, name: str) -> None:
    tokenizer = load(save_folder(name, tmp_path))
    end, rng = tokenizer.vocab_size - 1, random.Random(3)
    grammars = Grammars(tokenizer.pieces, frozenset([end]), tokenizer.vocab_size, tokenizer.encode_within)
    for expression in EXPRESSIONS:
        compiled = grammars.compile(Grammar("regex", expression)).result(timeout=60)
        for _ in range(3):
            matcher, answer, text = compiled.start([], (), False), list[int](), Detokenizer(tokenizer, within=True)
            while (mask := masks(matcher, [0], [-1], tokenizer.vocab_size)[0]) is not None:
                answer.append(rng.choice([i for i in range(tokenizer.vocab_size) if mask[i >> 3] >> (i & 7) & 1]))
                if answer[-1] == end:
                    break
                matcher.advance(answer[-1:])
            assert matcher.error is None
            shown = text.append(answer[:-1]) + text.flush()
            assert re.fullmatch(expression, shown), (expression, shown)
