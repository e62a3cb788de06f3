"""A tiny checkpoint that writes readable letters: a random Llama over printable ASCII, two characters of several bytes
and some pairs of letters; and an engine that serves it for real.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.server.serving import NAME, Engine, free_port, launched

ADMIN_TOKEN = "an-admin-token"
END = "<|end|>"
TEMPLATE = """\
{%- if tools %}<tool_call>{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ m.role }}:{{ m.content }};{% endfor -%}
"""
MAX_MODEL_LEN = 512


def tokenizer(plain: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE: é and 🤷 are two and four tokens, " the" is one. plain: more tokens, which show in a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    readable = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = "".join(chr(code) for code in range(32, 127)) + "\né🤷"
    letters = {piece for piece, _ in readable.pre_tokenize_str(known) for piece in piece}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ('"', ":"), ("a", "b"), ("ab", "c")]
    tokens = [END, *(letter for letter in alphabet if letter in letters), *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = readable
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(END, special=True, normalized=False)])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return backend


def model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(1.5)
    return made


def save(made: LlamaForCausalLM, folder: Path, plain: Sequence[str] = (), template: str = TEMPLATE) -> None:
    made.save_pretrained(folder)
    tokenizer(plain).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "chat_template.jinja").write_text(template)


@contextmanager
def serving(
    folder: Path, target: LlamaForCausalLM, *flags: str, plain: Sequence[str] = (), template: str = TEMPLATE
) -> Iterator[Engine]:
    """The engine, with four drafts a step at every load, by a model that is near the target: most are accepted."""
    save(target, folder / "target", plain, template)
    draft = model(target.config.vocab_size)
    torch.manual_seed(6)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    save(draft, folder / "draft", plain, template)
    own = folder / "engine"
    own.mkdir()
    (folder / "admin").write_text(ADMIN_TOKEN)
    port = free_port()
    command = [
        sys.executable, "-m", "pilotfish_engine.cli", "serve", str(folder / "target"), "--port", str(port),
        "--served-name", NAME, "--dtype", "float32", "--method", "STANDALONE", "--draft", str(folder / "draft"),
        "--max-model-len", str(MAX_MODEL_LEN), "--num-steps", "4", "--topk", "1",
        "--num-draft-tokens", "5", "--tuning", "Fixed", "--disable-threshold", "1000", "--page-size", "4",
        "--chunk-size", "64", "--max-running-requests", "8",
        "--kv-tokens", "4096", "--admin-token-file", str(folder / "admin"), *flags,
    ]  # fmt: skip
    with launched(command, port, own) as started:
        yield started
