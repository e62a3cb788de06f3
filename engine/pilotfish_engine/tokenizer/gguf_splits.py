"""Splits texts into words as byte-level vocabularies do. The split has the name that a GGUF file gives it
(`tokenizer.ggml.pre`).

The names and what each stands for are llama.cpp's (src/llama-vocab.cpp); the expressions are those of the models' own
tokenizer.json files, which llama.cpp writes in its own dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class Splits:
    """expressions: applied one after the other, each to what the ones before it left. whole_words: a word that is a
    token is that token, whatever the merges say. add_bos: where the file does not say."""

    expressions: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in self.expressions]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES


def _words(letters: str = r"\p{L}", digits: str = "", symbols: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """GPT-4's, of which most are variants."""
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}| ?{symbols}|\s*[\r\n]+|{_SPACES}"


def _cased(ending: str, digits: str) -> str:
    """GPT-4o's: a capital begins a word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    head = r"[^\r\n\p{L}\p{N}]?"
    words = f"{head}{upper}*{lower}+{ending}|{head}{upper}+{lower}*{ending}"
    return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"


_LATIN = (  # letters with case: Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee and others
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-\u212dℯ-ℴℹ"
    "ℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    rf"|\s*[\r\n]+|{_SPACES}",
)
_NO_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"

_LLAMA_3 = Splits((_words(digits="{1,3}"),), whole_words=True, add_bos=True)
_SPLITS: Mapping[str, Splits] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": _LLAMA_3,
    "dbrx smaug-bpe glm4 chatglm-bpe": Splits(_LLAMA_3.expressions),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": Splits((_words(),)),
    "qwen35": Splits((_words(r"[\p{L}\p{M}]", symbols=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)),
    "seed-coder": Splits((_words(symbols=r"[^\s\p{L}\p{N}\r\n]+"),)),
    "bailingmoe bailingmoe2 llada-moe": Splits(
        (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES,)
    ),
    "minicpm5": Splits((r"\p{N}{1,3}", _words(digits="+")), whole_words=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Splits((_cased(_ENDINGS + "?", "{1,3}"),)),
    "tekken": Splits((_cased("", ""),), whole_words=True, add_bos=True),
    "tiny_aya cohere2moe": Splits((r"\d{1,3}(?=(?:\d{3})*\b)", _cased(_ENDINGS + "?", "{1,3}"))),
    "deepseek-llm": Splits(
        (r"[\r\n]", rf"\s?[{_LATIN}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _DEEPSEEK_CJK, r"\p{N}")
    ),
    "deepseek-coder": Splits((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Splits(_DEEPSEEK_3),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum": Splits((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Splits((r"\p{N}", _GPT2)),
    "falcon": Splits((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "bloom poro-chat gpt3-finnish": Splits((_NO_PUNCTUATION,)),
    "viking": Splits((_NO_PUNCTUATION, r"\p{N}")),
    "superbpe": Splits((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "default": Splits((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
SPLITS: Mapping[str, Splits] = {name: splits for names, splits in _SPLITS.items() for name in names.split()}
