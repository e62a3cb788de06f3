"""The formats of a model's files, each with a sound model and what a hostile hub makes of one of its files."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.attack.inspected import Inspector
from tests.attack.mutations import bytes_mutated, json_mutated
from tests.engine.model.test_broken_files import write_gguf
from tests.engine.model.tiny import MODELS, VARIANTS
from tests.engine.speculation import block_drafts
from tests.engine.speculation.eagle_formats import FORMATS as HEADS
from tests.engine.speculation.eagle_heads import target_model
from tests.engine.tokenizer.families import add_tokenizer, save_folder
from tests.engine.tokenizer.test_sources import LISTED, sentencepiece_model, tekken

Mutate = Callable[[Path, random.Random], None]
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}"  # noqa: E501


@dataclass(frozen=True)
class Format:
    """make: sound models by name, each a folder or a file below the given one. mutate: changes one of them. target:
    whether each is inspected beside the model `target`."""

    make: Callable[[Path], list[Path]]
    mutate: Mutate
    target: bool = False


def in_bytes(*names: str) -> Mutate:
    def mutate(model: Path, rng: random.Random) -> None:
        file = model if model.is_file() else model / rng.choice(names)
        file.write_bytes(bytes_mutated(file.read_bytes(), rng))

    return mutate


def in_json(*names: str) -> Mutate:
    def mutate(model: Path, rng: random.Random) -> None:
        file = model / rng.choice([name for name in names if (model / name).exists()])
        file.write_text(json_mutated(json.loads(file.read_text()), rng))

    return mutate


def in_header(model: Path, rng: random.Random) -> None:
    """Of a safetensors file: its JSON, with the length that it has, or not."""
    file = model / "model.safetensors"
    data = file.read_bytes()
    if rng.random() < 0.3:
        file.write_bytes(bytes_mutated(data, rng))
        return
    (length,) = struct.unpack("<Q", data[:8])
    header = json_mutated(json.loads(data[8 : 8 + length]), rng).encode(errors="replace")
    told = rng.choice((len(header),) * 9 + (1 << 62,))
    file.write_bytes(struct.pack("<Q", told) + header + data[8 + length :])


def either(*mutations: Mutate) -> Mutate:
    return lambda model, rng: rng.choice(mutations)(model, rng)


def models(folder: Path, names: list[str] = VARIANTS) -> list[Path]:
    made = []
    for name in names:
        MODELS[name].save_pretrained(folder / name)
        made.append(folder / name)
    return made


def sharded(folder: Path) -> list[Path]:
    MODELS["untied"].save_pretrained(folder / "shards", max_shard_size="60KB")
    return [folder / "shards"]


def ggufs(folder: Path) -> list[Path]:
    write_gguf(folder / "plain.gguf")
    return [folder / "plain.gguf"]


def gguf_tokenizers(folder: Path) -> list[Path]:
    made = []
    for name in ("llama-2", "llama-3"):
        made.append(folder / f"{name}.gguf")
        write_gguf(made[-1], also=partial(add_tokenizer, name))
    return made


def with_tokenizer(*names: str, write: Callable[[Path], Any] = lambda folder: None) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        made = []
        for name in names:
            (model,) = models(folder / name, ["untied"])
            save_folder(name, model)
            (model / "chat_template.jinja").write_text(TEMPLATE)
            (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
            (model / "added_tokens.json").write_text(json.dumps({"<more>": 90000}))
            write(model)
            made.append(model)
        return made

    return make


def as_sentencepiece(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").write_bytes(sentencepiece_model("llama-2"))


def as_tekken(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tekken.json").write_text(tekken(model.parent / "family", LISTED))


def heads(folder: Path) -> list[Path]:
    made = [HEADS[name](target_model()).write(folder / name) for name in ("EAGLE", "EAGLE-3 of SpecForge")]
    return [*made, block_drafts.block_draft(64).save(folder / "draft")]


SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
FORMATS: Mapping[str, Format] = {
    "gguf": Format(ggufs, in_bytes()),
    "gguf tokenizer": Format(gguf_tokenizers, in_bytes()),
    "safetensors": Format(lambda folder: models(folder, ["untied", "qwen3 moe"]), in_header),
    "config.json": Format(models, in_json("config.json", "config.json", "generation_config.json")),
    "index": Format(sharded, in_json("model.safetensors.index.json")),
    "draft": Format(heads, either(in_json("config.json"), in_header), target=True),
    "tokenizer.json": Format(with_tokenizer("llama-2", "llama-3"), in_json("tokenizer.json")),
    "settings": Format(
        with_tokenizer("llama-2"), either(in_json(*SETTINGS), in_bytes("chat_template.jinja"))
    ),
    "tokenizer.model": Format(with_tokenizer("llama-2", write=as_sentencepiece), in_bytes("tokenizer.model")),
    "tekken.json": Format(with_tokenizer("llama-3", write=as_tekken), in_json("tekken.json")),
}


def attack(name: str, folder: Path, count: int, inspector: Inspector, seed: int = 0) -> list[str]:
    """Inspects `count` mutated files of a format. Returns what is wrong with what came of them, with the seed of each
    in front."""
    form = FORMATS[name]
    folder.mkdir(parents=True, exist_ok=True)
    sound = form.make(folder)
    beside = []
    if form.target:
        target_model().save_pretrained(folder / "target")
        beside = ["--target", str(folder / "target")]
    for model in sound:
        assert (verdict := inspector.inspect(str(model), "--json", *beside)).code in (0, 1), verdict
    faults = []
    for number in range(seed, seed + count):
        rng = random.Random(f"{name} {number}")
        source = rng.choice(sound)
        model = folder / f"mutated{source.suffix}"
        if source.is_dir():
            shutil.copytree(source, model)
        else:
            shutil.copy(source, model)
        form.mutate(model, rng)
        fault = inspector.inspect(str(model), "--json", *beside).fault()
        if fault is not None:
            faults.append(f"{name} {number} of {source.name}: {fault}")
        shutil.rmtree(model) if model.is_dir() else model.unlink()
    return faults


def main(arguments: list[str]) -> int:
    """FOLDER COUNT [FORMAT…]"""
    folder, count, *names = arguments
    inspector, failed = Inspector(), 0
    for name in names or FORMATS:
        faults = attack(name, Path(folder) / name, int(count), inspector)
        print(f"{name}: {count} mutated files, {len(faults)} faults", *faults[:20], sep="\n  ", flush=True)
        failed += len(faults)
    inspector.close()
    return int(failed > 0)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
