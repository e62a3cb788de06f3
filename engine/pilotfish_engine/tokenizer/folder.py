"""The tokenizer of a Hugging Face folder: tokenizer.json, and beside it the special tokens, ends and chat templates.

tokenizer.json is taken as it is: no class of `transformers` that a folder names builds it anew. The other files add to
it what `transformers` adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pilotfish_engine import files
from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.tokenizer.chat import ChatTemplate
from pilotfish_engine.tokenizer.pieces import UnknownDecoderError, read_pieces
from pilotfish_engine.tokenizer.sources import read_sentencepiece, read_tekken
from pilotfish_engine.tokenizer.templates import chosen_template, folder_templates
from pilotfish_engine.tokenizer.vocabulary import Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
READ = ("tokenizer.json", "tekken.json", "tokenizer.model")
_OTHERS = ("tiktoken.model", "qwen.tiktoken", "vocab.json", "spiece.model")
MOST_HOLES = 1 << 16  # numbers without a token, beside as many as there are tokens
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_folder(path: Path) -> Tokenizer:
    """Raises CheckpointError when tokenizer.json is missing, damaged, or decodes other than token by token."""
    file, backend, named_by_default = _backend(path)
    backend.no_truncation()  # what was set for training
    backend.no_padding()
    settings = named_by_default | _json(path, "tokenizer_config.json")
    try:
        named = _add_tokens(backend, path, settings)
        tokens = _tokens(backend)
    except (TypeError, LookupError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: its special tokens are malformed ({error}); give whole files") from error
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    try:
        pieces = read_pieces(backend.decoder, tokens, special)
    except UnknownDecoderError as error:
        raise CheckpointError(f"{file}: {error}") from error
    ends = list(_ends(path, backend, named.get("eos_token")))
    return Tokenizer(
        backend=backend,
        decoding=pieces,
        eos_token_ids=frozenset(ends),
        end_token_id=ends[0] if ends else None,
        chat_template=_chat_template(path, settings, named),
    )


def _backend(path: Path) -> tuple[Path, Backend, dict[str, Any]]:
    """What is read, and the special tokens that tokenizer_config.json need not name."""
    if (file := files.find(path, "tokenizer.json")) is not None:
        try:
            return file, Backend.from_str(files.read_text(file, files.LARGE)), {}
        except CheckpointError:
            raise
        except Exception as error:  # the library raises no narrower class
            raise CheckpointError(f"{file}: not a tokenizer ({error}); give a folder with a whole one") from error
    for name, read in (("tekken.json", read_tekken), ("tokenizer.model", read_sentencepiece)):
        if (other_file := files.find(path, name)) is not None:
            backend = read(other_file)
            ends = {"bos_token": ("<s>", "<bos>"), "eos_token": ("</s>", "<eos>")}
            known = {
                key: [text for text in texts if backend.token_to_id(text) is not None] for key, texts in ends.items()
            }
            return other_file, backend, {key: texts[0] for key, texts in known.items() if texts}
    other = next((name for name in _OTHERS if (path / name).is_file()), None)
    if other is None:
        raise CheckpointError(f"{path}: tokenizer.json is missing; give a folder that has one")
    raise CheckpointError(
        f"{path}: tokenizer.json is missing, and {other} cannot be read; the tokenizer.json that "
        "AutoTokenizer.from_pretrained(…).save_pretrained(…) of `transformers` writes would work"
    )


def _tokens(backend: Backend) -> list[str | None]:
    """By id, which may have holes. Added tokens as the decoder gets them, which is as they are after normalizing."""
    ids = backend.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if size > MOST_HOLES + 2 * len(ids):
        raise ValueError(f"its {len(ids)} tokens have numbers up to {size - 1}")
    tokens: list[str | None] = [None] * size
    for token, i in ids.items():
        tokens[i] = token
    for i in backend.get_added_tokens_decoder():
        tokens[i] = backend.id_to_token(i)
    return tokens


def _add_tokens(backend: Backend, path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Adds what the settings have beyond tokenizer.json, in the reference library's order. Returns the special tokens
    by their names."""
    if "added_tokens_decoder" in settings:
        listed = {int(i): _token(token) for i, token in settings["added_tokens_decoder"].items()}
    else:  # older folders
        settings = {**settings, **_json(path, "special_tokens_map.json")}
        named = set(_named(settings).values())
        listed = {
            int(i): AddedToken(text, normalized=text not in named, special=text in named)
            for text, i in _json(path, "added_tokens.json").items()
        } | backend.get_added_tokens_decoder()
    backend.add_tokens([listed[i] for i in sorted(listed)])
    known = {token.content: token for token in listed.values()}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    more = {name: _content(token) for name, token in extra.items()} if isinstance(extra, dict) else {}
    specials = [*(_named(settings) | more).values(), *(_content(token) for token in extra if not more)]
    backend.add_special_tokens(
        [known.get(text) or AddedToken(text, special=True, normalized=False) for text in specials if text]
    )
    return _named(settings)


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """The seven that every tokenizer may name, and a model's own, such as image_token."""
    own = (name for name, token in settings.items() if name.endswith("_token") and isinstance(token, str | dict))
    texts = {name: _content(settings.get(name)) for name in (*_NAMED, *own)}
    return {name: text for name, text in texts.items() if text}


def _content(token: Any) -> str | None:
    """A special token is written as its text or as an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _token(written: Mapping[str, Any]) -> AddedToken:
    return AddedToken(written["content"], **{name: bool(written[name]) for name in _FLAGS if name in written})


def _ends(path: Path, backend: Backend, eos_token: str | None) -> Iterator[int]:
    """As the tokenizer's, the generation's and the model's settings have them: published folders disagree, and each is
    an end that the model was trained to write. The first ends a message."""
    token_id = None if eos_token is None else backend.token_to_id(eos_token)
    if token_id is not None:
        yield token_id
    config = _json(path, "config.json")
    for place in (_json(path, "generation_config.json"), config, config.get("text_config")):
        ids = place.get("eos_token_id") if isinstance(place, dict) else None
        yield from (i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i >= 0)


def _chat_template(path: Path, settings: Mapping[str, Any], named: Mapping[str, str]) -> ChatTemplate | None:
    try:
        return chosen_template(folder_templates(path, settings.get("chat_template")), named)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: its chat template cannot be read ({error}); give whole files") from error


def _json(path: Path, name: str) -> dict[str, Any]:
    """Empty where there is no such file."""
    file = files.find(path, name)
    return {} if file is None else files.read_json(file)
