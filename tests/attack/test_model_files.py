"""Files from a hub are input: whatever they hold, `inspect` says one sentence, and they cost no more than their size.

Mutated files first, a few of each format (all of them: `make attack`), then lies that no chance would tell.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attack.inspected import Inspector
from tests.attack.model_files import FORMATS, attack, models, with_tokenizer
from tests.engine.model.test_broken_files import write_gguf

COUNTS = {name: 3 if "token" in name or name in ("settings", "tekken.json") else 25 for name in FORMATS}


@pytest.fixture(scope="module")
def inspector() -> Iterator[Inspector]:
    started = Inspector()
    yield started
    started.close()


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files_are_refused_in_a_sentence_or_read(name: str, tmp_path: Path, inspector: Inspector) -> None:
    assert attack(name, tmp_path, COUNTS[name], inspector, seed=1_000_000) == []


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def head(keys: int, tensors: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def tensor(name: str, sizes: tuple[int, ...], kind: int, start: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, start)


ARRAY = 9
LIES = {
    "more keys than bytes": (head(1 << 62, 0, b"\0" * 99), "keys at 24 run past the end"),
    "more tensors than bytes": (head(0, (1 << 64) - 1, b"\0" * 99), "tensors at 24 run past the end"),
    "an array without end": (
        head(1, 0, key("a", ARRAY, struct.pack("<IQ", 12, 1 << 61))), "numbers at 49 run past the end",
    ),
    "strings without end": (head(1, 0, key("a", ARRAY, struct.pack("<IQ", 8, 1 << 50))), "strings at 49 run past"),
    "a string without end": (head(1, 0, struct.pack("<QQ", 1 << 63, 0)), "bytes of a string at 32 run past the end"),
    "arrays of arrays": (
        head(1, 0, key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 500)), "'a' is an array of type 9; numbers",
    ),
    "a type of its own": (head(1, 0, key("a", 13, b"\0" * 8)), "'a' is of type 13, which is not known"),
    "a key twice": (head(2, 0, key("a", 4, b"\1\0\0\0") * 2), "the key 'a' is there twice"),
    "no power of two": (
        head(1, 0, key("general.alignment", 4, struct.pack("<I", 48))), "general.alignment is 48, where a power",
    ),
    "a tensor twice": (
        head(0, 2, tensor("t", (8,), 0, 0) + tensor("t", (8,), 0, 32) + bytes(99)), "'t' is there twice",
    ),
    "tensors over each other": (
        head(0, 2, tensor("t", (16,), 0, 0) + tensor("u", (8,), 0, 32) + bytes(200)), "'t' and 'u' overlap",
    ),
    "a tensor past the end": (head(0, 1, tensor("t", (8,), 0, 1 << 40) + bytes(99)), "is not within the file"),
    "a tensor of 2^63 values": (
        head(0, 1, tensor("t", (1 << 32, 1 << 31), 0, 0) + bytes(99)), "is not within the file",
    ),
    "a tensor beside the line": (head(0, 1, tensor("t", (8,), 0, 8) + bytes(199)), "aligned to 32"),
    "parts of a block": (head(0, 1, tensor("t", (33,), 8, 0) + bytes(199)), "its rows are of 32s"),
    "no dimension": (head(0, 1, tensor("t", (), 0, 0) + bytes(199)), "has 0 dimensions"),
    "a thousand dimensions": (head(0, 1, tensor("t", (1,) * 1000, 0, 0)), "has 1000 dimensions"),
    "an old version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, where 2 and 3 are known"),
    "the other end first": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_gguf_that_lies_is_refused(name: str, tmp_path: Path, inspector: Inspector) -> None:
    data, sentence = LIES[name]
    (tmp_path / "model.gguf").write_bytes(data)
    assert_refused(inspector, tmp_path / "model.gguf", sentence)


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a billion layers": ("gemma3", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 1024"),
    "a billion experts": ("qwen3 moe", {"num_experts": 10**9}, "num_experts is 1000000000; at most 4096"),
    "a billion extra layers": ("glm4 moe", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 10000"),
    "layers by name": ("untied", {"num_hidden_layers": "3"}, "num_hidden_layers is '3'; a positive integer"),
    "half a head": ("untied", {"num_attention_heads": 4.5}, "num_attention_heads is 4.5; a positive integer"),
    "true heads": ("untied", {"num_key_value_heads": True}, "num_key_value_heads is True; a positive integer"),
    "a norm of nothing": ("untied", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a number from 0 to 1"),
    "an endless base": (
        "untied", {"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf; a number from 1.001",
    ),
    "a base of one": ("untied", {"rope_parameters": {"rope_theta": 1}}, "rope_theta is 1; a number from 1.001"),
    "rope as a list": ("untied", {"rope_parameters": [1]}, "rope_parameters is [1]; an object is needed"),
    "text as a list": ("gemma3", {"text_config": [3]}, "text_config is [3]; an object is needed"),
    "no period": ("gemma3", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern is 0"),
    "kinds by number": ("gemma3", {"layer_types": [1, 2, 3]}, "layer_types is [1, 2, 3]; a list of texts"),
    "architectures as a text": ("untied", {"architectures": "Llama"}, "architectures is 'Llama'; a list"),
    "an end below none": ("untied", {"eos_token_id": [2, -7]}, "eos_token_id is [2, -7]; numbers of tokens"),
    "a word for yes": ("untied", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; true or false"),
    "groups as a text": (
        "untied",
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": "all"}},
        "a value is not of the kind that is read there",
    ),
    "an article": ("untied", {"rope_parameters": {"rope_type": "x\n" * 9000}}, "rope type 'x\\nx"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_whose_values_cannot_be_is_refused(name: str, tmp_path: Path, inspector: Inspector) -> None:
    kind, changes, sentence = CONFIGS[name]
    (model,) = models(tmp_path, [kind])
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert_refused(inspector, model, sentence)


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def link(name: str, to: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(to)

    return change


def pipe(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return change


def listening(model: Path) -> None:
    (model / "generation_config.json").unlink()
    os.chdir(model)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("generation_config.json")


def index(name: object) -> Callable[[Path], None]:
    return write("model.safetensors.index.json", json.dumps({"weight_map": {"model.norm.weight": name}}))


def safetensors(entry: dict[str, Any], length: int | None = None) -> bytes:
    header = json.dumps({"model.norm.weight": entry}).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(256)


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe for its weights": (pipe("model.safetensors"), "is a pipe; a regular file would work"),
    "a pipe for its config": (pipe("config.json"), "has no config.json"),
    "a socket": (listening, "is a socket"),
    "a folder": (lambda model: (model / "model.safetensors.index.json").mkdir(), "is a directory"),
    "a device": (link("config.json", "/dev/zero"), "has no config.json"),
    "a device for an index": (link("model.safetensors.index.json", "/dev/zero"), "leads out of"),
    "a link out": (link("generation_config.json", "/etc/hostname"), "leads out of"),
    "a link up": (link("model.safetensors", "../other.safetensors"), "leads out of"),
    "a link to itself": (link("generation_config.json", "generation_config.json"), "leads"),
    "a shard elsewhere": (index("../../etc/passwd"), "leads out of"),
    "a shard at the root": (index("/etc/passwd"), "leads out of"),
    "a shard without a name": (index(""), "is a directory"),
    "a shard of no name": (index("a\0b"), "no name of a file"),
    "a shard by number": (index(7), "no weight_map"),
    "a shard of a long name": (index("x" * 5000), "no name of a file"),
    "an index of shards": (index({"a": 1}), "no weight_map"),
    "a deep config": (write("config.json", '{"a":' * 100_000), "not readable as JSON"),
    "a wide number": (write("generation_config.json", '{"eos_token_id": ' + "9" * 5000 + "}"), "not readable as JSON"),
    "a config of 17 MB": (write("config.json", b" " * (17 << 20)), "has more than 16777216 bytes"),
    "no letters": (write("config.json", b"\xff\xfe{}"), "not UTF-8"),
    "a header without end": (write("model.safetensors", safetensors({}, 1 << 62)), "not a whole safetensors file"),
    "weights past the end": (
        write("model.safetensors", safetensors({"dtype": "F32", "shape": [64], "data_offsets": [0, 1 << 40]})),
        "not a whole safetensors file",
    ),
    "fewer bytes than numbers": (
        write("model.safetensors", safetensors({"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 256]})),
        "not a whole safetensors file",
    ),
    "a size that wraps": (
        write("model.safetensors", safetensors({"dtype": "F32", "shape": [1 << 32] * 2, "data_offsets": [0, 256]})),
        "not a whole safetensors file",
    ),
    "an end of 2^40": (write("generation_config.json", '{"eos_token_id": 1099511627776}'), "numbers of tokens"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_none_is_refused(
    name: str, tmp_path: Path, inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (model,) = models(tmp_path, ["untied"])
    (tmp_path / "other.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    change, sentence = FOLDERS[name]
    change(model)
    assert_refused(inspector, model, sentence)


def test_links_within_a_folder_and_into_a_hub_s_cache_are_followed(tmp_path: Path, inspector: Inspector) -> None:
    repository = tmp_path / "models--a--b"
    (model,) = models(repository / "snapshots", ["untied"])
    (repository / "blobs").mkdir()
    for file in list(model.iterdir()):
        file.rename(repository / "blobs" / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    verdict = inspector.inspect(str(model), "--json")
    assert (verdict.code, verdict.err) == (0, "")


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        file = model / "tokenizer.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


BREAKS = "its tokenizer breaks its library, or takes more time or memory than it may"
TOKENIZERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "an expression that explodes": (edited(lambda t: t.update(pre_tokenizer=split(r"(a|aa)+$b"))), BREAKS),
    "a megabyte for each letter": (edited(lambda t: t.update(normalizer=replace("b" * (1 << 20)))), BREAKS),
    "a pipe for its settings": (
        pipe("tokenizer_config.json"), "tokenizer_config.json: is a pipe; a regular file would work",
    ),
    "a number far away": (
        edited(lambda t: t["model"]["vocab"].update(far=4_000_000_000)), "numbers up to 4000000000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_explodes_costs_itself(name: str, tmp_path: Path, inspector: Inspector) -> None:
    (model,) = with_tokenizer("llama-2")(tmp_path)
    change, sentence = TOKENIZERS[name]
    change(model)
    verdict = inspector.inspect(str(model), "--json")
    assert verdict.fault() is None
    assert sentence in (verdict.err if verdict.code == 2 else json.loads(verdict.out)["tokenizer"])


def test_a_file_that_is_cut_anywhere_in_its_head_is_refused(tmp_path: Path, inspector: Inspector) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    for size in range(5, 1500, 97):
        file.write_bytes(whole[:size])
        assert_refused(inspector, file, f"not a whole GGUF file of {size} bytes")


def assert_refused(inspector: Inspector, model: Path, sentence: str) -> None:
    verdict = inspector.inspect(str(model), "--json")
    assert verdict.fault() is None
    assert verdict.code == 2, verdict
    assert sentence in verdict.err
