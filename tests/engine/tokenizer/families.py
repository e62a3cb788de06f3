"""Small tokenizers built as the listed families publish theirs, as folders and as GGUF files, and texts to try them on.

Each is trained on the texts below, with the normalizer, pre-tokenizer, decoder, post-processor and added tokens of the
family's own tokenizer.json. Their vocabularies are small, so that most characters of most scripts are several tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.tokenization_utils_base import generate_merges

SENTENCES = [
    "The quick brown fox jumps over the lazy dog; it's 12:45, and they'll pay 1,234.50 dollars.",
    "def f(x):\n    return  x ** 2  # comment\n\n\nclass A:\n\tpass\r\n",
    "Ærøskøbing, Zürich: naïve café, smörgåsbord – e\u0301 ﬁn ½ ② Ⅷ",
    "Привет, мир! Съешь же ещё этих мягких французских булок.",
    "Γειά σου Κόσμε, ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "مرحبا بالعالم، كيف حالك اليوم؟ ١٢٣ و ٤٥٦",
    "שלום עולם, מה שלומך היום?",
    "नमस्ते दुनिया, आप कैसे हैं? १२३",
    "আমার সোনার বাংলা, আমি তোমায় ভালোবাসি।",
    "สวัสดีชาวโลก วันนี้เป็นอย่างไรบ้าง",
    "你好，世界。今天天气很好，我们去公园吧！",
    "こんにちは世界。今日はいい天気ですね。カタカナ",
    "안녕하세요 세계! 오늘은 날씨가 좋네요.",
    "გამარჯობა მსოფლიო, როგორ ხარ?",
    "ሰላም ዓለም፣ እንዴት ነህ?",
    "မင်္ဂလာပါ ကမ္ဘာလောက",
    "வணக்கம் உலகம், எப்படி இருக்கிறீர்கள்?",
    "🤷‍♀️ 👩‍👩‍👧‍👦 🇫🇷 👍🏽 \U0001f600 𐐷 𝒳",
    "HelloWorld camelCase SCREAMING_CASE x1y2 IT'S DON'T",
    "\x00\x01\x7f \u200b \ufeff \u2028 \ufffd \u00a0",
]


@cache
def texts() -> tuple[str, ...]:
    """Two hundred: each sentence, and pieces of them put together in any order."""
    rng = random.Random(12)
    made = ["", " ", "  ", "\n", "▁", " ▁a", *SENTENCES]
    while len(made) < 200:
        parts = []
        for sentence in rng.sample(SENTENCES, rng.randrange(1, 4)):
            start = rng.randrange(len(sentence))
            parts.append(sentence[start : start + rng.randrange(1, 40)])
        made.append(rng.choice(["", " ", "  ", "\n", "\t"]).join(["", *parts][rng.randrange(2) :]))
    return tuple(made)


@dataclass(frozen=True)
class Family:
    """make: the tokenizer. gguf: keys of its GGUF file but those of the vocabulary; empty: it has none.
    config: tokenizer_config.json."""

    make: Callable[[], Tokenizer]
    gguf: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)


_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+")


def _split(*expressions: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions]


def _byte_level(
    steps: Sequence[pre_tokenizers.PreTokenizer],
    special: Sequence[str],
    *,
    plain: Sequence[str] = (),
    bos: str | None = None,
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
    use_regex: bool = False,
) -> Tokenizer:
    """special, plain: added tokens; those that are not special show in a text."""
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=640, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if bos is not None:
        frame = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, made.token_to_id(bos))])
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), frame])
    return made


def _sentencepiece(
    special: Sequence[str],
    *,
    prefix: bool,
    metaspace: bool = False,
    plain: Sequence[str] = (),
    frame: bool = True,
    rstrip: Sequence[str] = (),
) -> Tokenizer:
    """special: unknown, beginning and end of a text first, as SentencePiece numbers them. plain: user-defined."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trained.train_from_iterator(SENTENCES[:8], trainers.BpeTrainer(vocab_size=420, show_progress=False))
    learned = sorted(trained.get_vocab().items(), key=lambda entry: entry[1])
    joined = [token for token, _ in learned if len(token) > 1]
    letters = [token for token, _ in learned if len(token) == 1]
    tokens = [*special[:3], *plain, *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *letters]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    ranks = {token: -float(i) for i, token in enumerate(joined)}
    merges = generate_merges({t: i for t, i in vocabulary.items() if t in ranks or t in letters}, ranks)
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token=special[0], fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif prefix:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        made.normalizer = spaces
        made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=token in rstrip) for token in special]
    )
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if frame:
        bos = next(token for token in special[:3] if "bos" in token or token == "<s>")
        made.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, made.token_to_id(bos))]
        )
    return made


def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(SENTENCES, trainer)
    return made


_PHI3 = ("<|user|>", "<|assistant|>", "<|end|>")
_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]")
_HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>", "<|end|>")
_SPM = {"model": "llama"}

FAMILIES: Mapping[str, Family] = {
    "llama-2": Family(lambda: _sentencepiece(("<unk>", "<s>", "</s>"), prefix=True), _SPM),
    "mistral-v3": Family(lambda: _sentencepiece(("<unk>", "<s>", "</s>", *_MISTRAL), prefix=True, metaspace=True), {}),
    "mistral-v1": Family(lambda: _sentencepiece(("<unk>", "<s>", "</s>", *_MISTRAL), prefix=True), _SPM),
    "gemma-3": Family(
        lambda: _sentencepiece(
            ("<unk>", "<bos>", "<eos>", "<end_of_turn>"), prefix=False, plain=("\n\n", "\n\n\n", "  ", "    ")
        ),
        {"model": "llama", "add_space_prefix": False, "arch": "gemma3"},
    ),
    "phi-3": Family(
        lambda: _sentencepiece(("<unk>", "<s>", "</s>", *_PHI3), prefix=True, frame=False, rstrip=("</s>", *_PHI3)),
        {"model": "llama", "add_bos_token": False, "name": "Phi-3 Mini"},
    ),
    "unigram": Family(_unigram, {}),
    "gpt-2": Family(lambda: _byte_level((), ("<|endoftext|>",), use_regex=True), {"pre": "gpt-2"}),
    "llama-3": Family(
        lambda: _byte_level(
            _split(_LETTERS % "{1,3}"), ("<|begin_of_text|>", "<|eot_id|>"), bos="<|begin_of_text|>", ignore_merges=True
        ),
        {"pre": "llama-bpe", "bos": "<|begin_of_text|>"},
    ),
    "qwen-3": Family(
        lambda: _byte_level(
            _split(_LETTERS % ""),
            ("<|endoftext|>", "<|im_end|>"),
            plain=("<think>", "</think>", "<tool_call>"),
            normalizer=normalizers.NFC(),
        ),
        {"pre": "qwen2"},
    ),
    "deepseek-v3": Family(
        lambda: _byte_level(
            _split(*_DEEPSEEK_V3),
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
            plain=("<｜tool▁call▁begin｜>",),
            bos="<｜begin▁of▁sentence｜>",
        ),
        {"pre": "deepseek-v3", "bos": "<｜begin▁of▁sentence｜>", "add_bos_token": True},
    ),
    "deepseek-coder": Family(
        lambda: _byte_level(
            [*_split(*_DEEPSEEK_CODER), pre_tokenizers.Digits(individual_digits=True)], ("<｜end▁of▁sentence｜>",)
        ),
        {"pre": "deepseek-coder"},
    ),
    "gpt-4o": Family(
        lambda: _byte_level(_split(_CASED % (_CONTRACTED, _CONTRACTED, "{1,3}")), _HARMONY), {"pre": "gpt-4o"}
    ),
    "tekken": Family(
        lambda: _byte_level(_split(_CASED % ("", "", "")), ("<s>", "</s>", *_MISTRAL), bos="<s>", ignore_merges=True),
        {"pre": "tekken", "bos": "<s>"},
    ),
    "smollm2": Family(
        lambda: _byte_level(
            [pre_tokenizers.Digits(individual_digits=True)], ("<|endoftext|>", "<|im_end|>"), use_regex=True
        ),
        {"pre": "smollm"},
    ),
    "glm-4": Family(
        lambda: _byte_level(_split(_LETTERS % "{1,3}"), ("<|endoftext|>", "<|user|>"), plain=("<think>",)),
        {"pre": "glm4"},
    ),
}


def save_folder(name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    FAMILIES[name].make().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **FAMILIES[name].config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_gguf(name: str, file: Path, **more: Any) -> Path:
    """With what a converter would write; more: further keys behind `tokenizer.`, or none of a kind."""
    writer = gguf.GGUFWriter(file, {**FAMILIES[name].gguf, **more}.get("arch", "llama"))
    add_tokenizer(name, writer, **more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def add_tokenizer(name: str, writer: gguf.GGUFWriter, **more: Any) -> None:
    keys = {"model": "gpt2", **FAMILIES[name].gguf, **more}
    made = FAMILIES[name].make()
    tokens, scores, kinds = vocabulary_of(made)
    writer.add_name(keys.get("name", name))
    writer.add_tokenizer_model(keys["model"])
    if "pre" in keys:
        writer.add_tokenizer_pre(keys["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if keys["model"] == "llama":
        writer.add_token_scores(scores)
    else:
        merges = json.loads(made.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
    if "bos" in keys:
        writer.add_bos_token_id(tokens.index(keys["bos"]))
    for flag in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if flag in keys:
            writer.add_bool(f"tokenizer.ggml.{flag}", keys[flag])
    for key in ("chat_template", "chat_template.tool_use"):
        if key in keys:
            writer.add_string(f"tokenizer.{key}", keys[key])
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        if key in keys:
            writer.add_uint32(f"tokenizer.ggml.{key}", keys[key])


def vocabulary_of(made: Tokenizer) -> tuple[list[str], list[float], list[gguf.TokenType]]:
    """Tokens, SentencePiece's scores and their types."""
    added = made.get_added_tokens_decoder()
    tokens = [made.id_to_token(i) or "" for i in range(made.get_vocab_size())]
    kinds = [_kind(i, token, added) for i, token in enumerate(tokens)]
    normal = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.NORMAL]
    ranks = {token: -float(i) for i, token in enumerate(normal)}
    return tokens, [ranks.get(token, 0.0) for token in tokens], kinds


def _kind(i: int, token: str, added: Mapping[int, AddedToken]) -> gguf.TokenType:
    if token == "<unk>":
        return gguf.TokenType.UNKNOWN
    if i in added:
        return gguf.TokenType.CONTROL if added[i].special else gguf.TokenType.USER_DEFINED
    return gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.NORMAL
