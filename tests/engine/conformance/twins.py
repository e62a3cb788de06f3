"""Twins of the suite's checkpoints: the same model with more rows than its tokenizer has tokens, or with fewer.

Whatever reads or says a row that is no token meets NaN there. Answers, probabilities and seeds are those of the
checkpoint itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tests.engine.conformance.models import Pair

AS_IT_IS, PADDED, SHORT = TWINS = ("as it is", "padded", "short")
PADDING = 271  # rows
DRAFT_PADDING = 40  # of a whole model: its own, and not the target's
CUT_PADDING = 5  # of a draft's own vocabulary


def rotated(*variant: object) -> str:
    return TWINS[crc32(repr(variant).encode()) % len(TWINS)]


def twin(pair: Pair, kind: str, folder: Path) -> Pair:
    if kind == AS_IT_IS:
        return pair
    target = whole_model(pair.target, kind, folder / "target", PADDING)
    if pair.draft is None:
        return Pair(target, None)
    if "model.embed_tokens.weight" in load_file(pair.draft / "model.safetensors"):
        return Pair(target, whole_model(pair.draft, kind, folder / "draft", DRAFT_PADDING))
    return Pair(target, pair.draft if kind == SHORT else padded_head(pair.draft, folder / "draft"))


def whole_model(source: Path, kind: str, folder: Path, padding: int) -> Path:
    """With a tokenizer: of its tokens alone where the model is padded, else of one that the model has no row for."""
    shutil.copytree(source, folder)
    size = vocabulary(folder)
    tokenizer(size if kind == PADDED else size + 1).save(str(folder / "tokenizer.json"))
    if kind == SHORT:
        return folder
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                tensors[name] = with_rows(tensor, padding)
        save_file(tensors, file, metadata={"format": "pt"})
    resize(folder, size + padding)
    return folder


def padded_head(source: Path, folder: Path) -> Path:
    """A head of the padded target; where it has a vocabulary of its own, with rows that are none of the tokens."""
    shutil.copytree(source, folder)
    file, size = folder / "model.safetensors", vocabulary(folder)
    tensors = load_file(file)
    if "d2t" in tensors:
        cut = tensors["d2t"].shape[0]
        tensors["d2t"] = torch.cat([tensors["d2t"], torch.full((CUT_PADDING,), size - cut)])
        tensors["t2d"] = torch.cat([tensors["t2d"], torch.ones(PADDING, dtype=torch.bool)])
        tensors["lm_head.weight"] = with_rows(tensors["lm_head.weight"], CUT_PADDING)
    elif "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = with_rows(tensors["lm_head.weight"], PADDING)
    save_file(tensors, file)
    resize(folder, size + PADDING, size + (CUT_PADDING if "d2t" in tensors else PADDING))
    return folder


def with_rows(tensor: Tensor, count: int) -> Tensor:
    return torch.cat([tensor, tensor.new_full((count, *tensor.shape[1:]), torch.nan)])


def vocabulary(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    found: int = config.get("text_config", config)["vocab_size"]
    return found


def resize(folder: Path, vocab_size: int, draft_vocab_size: int | None = None) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config", {})):
        if "vocab_size" in part:
            part["vocab_size"] = vocab_size
        if "draft_vocab_size" in part:
            part["draft_vocab_size"] = draft_vocab_size
    file.write_text(json.dumps(config))


def letters() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer(size: int) -> Tokenizer:
    """Of single letters, which is more than the suite needs."""
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters()[:size])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made
