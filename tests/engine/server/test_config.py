"""Flags and variables: what they resolve to, and the sentence for each that cannot work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish_engine.cli import configured, parse
from pilotfish_engine.config import (
    CONFIG,
    MODEL,
    OPTIONS,
    CapacityConfig,
    EngineConfig,
    ModelConfig,
    ServerConfig,
    SpeculationConfig,
    resolve,
)
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.errors import UsageError
from tests.engine.server.serving import MODEL as SMOLLM2
from tests.engine.server.serving import ROOT

EVERY_FLAG = (
    "--draft", "--method", "--host", "--port", "--dtype", "--num-steps", "--topk", "--num-draft-tokens", "--tuning",
    "--disable-threshold", "--max-running-requests", "--max-model-len", "--page-size", "--kv-tokens", "--chunk-size",
    "--tensor-parallel-size", "--overlap", "--max-waiting-requests", "--served-name", "--drain-seconds",
    "--allowed-origins",
    "--api-key-file", "--admin-token-file", "--pod-uid", "--draft-corpus", "--memory-fraction",
    "--tool-call-parser", "--reasoning-parser",
)  # fmt: skip


def test_the_flags_are_these_and_each_has_a_variable() -> None:
    assert {option.flag for option in OPTIONS} == set(EVERY_FLAG)
    assert {option.variable for option in OPTIONS} == {
        "PILOTFISH_" + flag[2:].upper().replace("-", "_") for flag in EVERY_FLAG
    }


def test_every_default_is_the_configurations() -> None:
    assert resolve({MODEL.key: "m"}, {}) == EngineConfig(ModelConfig("m"))


WRITTEN = {
    "draft": "d", "method": "STANDALONE", "host": "::1", "port": "9", "dtype": "bfloat16", "num_steps": "3",
    "topk": "2", "num_draft_tokens": "7", "tuning": "Fixed", "disable_threshold": "20", "max_running_requests": "5",
    "max_model_len": "99", "page_size": "32", "kv_tokens": "1000", "chunk_size": "64", "tensor_parallel_size": "1",
    "overlap": "true", "max_waiting_requests": "0", "served_name": "s", "drain_seconds": "1.5",
    "allowed_origins": "*", "api_key_file": "a",
    "admin_token_file": "b", "draft_corpus": "c", "memory_fraction": "0.8",
    "tool_call_parser": "hermes", "reasoning_parser": "none", "pod_uid": "uid-1",
}  # fmt: skip
RESOLVED = EngineConfig(
    ModelConfig("m", "bfloat16", 99),
    SpeculationConfig(
        "STANDALONE", "d", Envelope(num_steps=3, topk=2, num_draft_tokens=7, disable_threshold=20, tuning="Fixed"), "c"
    ),
    CapacityConfig(5, 32, 1000, 0.8, 64, 1, True, 0),
    ServerConfig("::1", 9, "s", "a", "b", 1.5, ("*",), "hermes", "none", "uid-1"),
)


def test_flags_and_variables_say_the_same() -> None:
    variables = {"PILOTFISH_" + key.upper(): value for key, value in WRITTEN.items()}
    assert resolve({"model": "m", **WRITTEN}, {}) == RESOLVED
    assert resolve({}, {"PILOTFISH_MODEL": "m", **variables}) == RESOLVED


def test_a_flag_wins_over_its_variable_and_an_empty_variable_is_none() -> None:
    config = resolve({"model": "m", "port": "1"}, {"PILOTFISH_PORT": "2", "PILOTFISH_TOPK": ""})
    assert (config.server.port, config.speculation.envelope.topk) == (1, 1)


def test_the_variable_that_kubernetes_makes_of_a_service_called_pilotfish_is_no_port() -> None:
    assert resolve({"model": "m"}, {"PILOTFISH_PORT": "tcp://10.0.0.7:8000"}).server.port == 8000


def test_the_configuration_reaches_the_model_process_whole() -> None:
    assert CONFIG.validate_json(CONFIG.dump_json(RESOLVED)) == RESOLVED


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "65536"], "--port '65536' is not a whole number from 0 to 65535"),
        (["--port", "http"], "--port 'http'"),
        (["--num-steps", "9"], "--num-steps '9' is not a whole number from 0 to 8"),
        (["--topk", "0"], "--topk '0' is not a whole number from 1 to 8"),
        (["--num-draft-tokens", "65"], "from 2 to 64"),
        (["--page-size", "24"], "--page-size '24' is not a power of two from 1 to 256; 16 would work"),
        (["--page-size", "512"], "--page-size '512'"),
        (["--dtype", "int3"], "--dtype 'int3' is unknown; one of auto, float32, bfloat16 would work"),
        (["--tuning", "adaptive"], "one of Adaptive, Fixed would work"),
        (["--disable-threshold", "0"], "--disable-threshold '0' is neither Auto nor"),
        (["--max-running-requests", "0"], "--max-running-requests '0'"),
        (["--max-model-len", "-5"], "--max-model-len '-5'"),
        (["--drain-seconds", "soon"], "--drain-seconds 'soon'"),
        (["--allowed-origins", "a.example"], "--allowed-origins 'a.example' is no list of origins"),
        (["--drain-seconds", "nan"], "--drain-seconds 'nan'"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size '0' is not a whole number from 1 to 64"),
        (["--memory-fraction", "1.5"], "is not a number from 0.1 to 0.98; 0.9 would work"),
        (["--kv-tokens", "100", "--max-model-len", "200"], "--kv-tokens 100 cannot hold.* 200 or more would work"),
        (["--method", "MAGIC"], "'MAGIC' is unknown; one of None, Auto, .* would work"),
        (["--method", "None", "--draft", SMOLLM2], "takes no draft"),
        (["--method", "None", "--draft-corpus", "c"], "None takes no corpus, but the corpus is 'c'; leave it out"),
        (["--method", "STANDALONE", "--draft-corpus", "c"], "STANDALONE takes no corpus"),
        (["--draft", "/nowhere"], "'/nowhere'.*does not exist"),
        (["--num-step", "3"], "unrecognized arguments: --num-step 3; .*--help"),
        (["--port"], "argument --port: expected one argument"),
    ],
)
def test_a_flag_that_cannot_work_is_refused_with_what_would(flags: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        configured(parse(["serve", SMOLLM2, *flags]))
    assert "\n" not in str(caught.value)


def test_a_bad_variable_is_refused_by_its_own_name() -> None:
    with pytest.raises(UsageError, match="PILOTFISH_OVERLAP 'maybe' is neither true nor false"):
        resolve({"model": "m"}, {"PILOTFISH_OVERLAP": "maybe"})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["serve"], "no MODEL is given"),
        (["serve", "/nowhere.gguf"], "/nowhere.gguf does not exist"),
        (["serve", SMOLLM2, "--method", "MAGIC"], "'MAGIC' is unknown"),
        (["serve", SMOLLM2, "--admin-token-file", "/nowhere"], "--admin-token-file '/nowhere' cannot be read"),
        (["serve", SMOLLM2, "--api-key-file", "/dev/null"], "--api-key-file '/dev/null' is empty"),
        (["serve", SMOLLM2, "--host", "203.0.113.1"], "--host 203.0.113.1 --port 8000 cannot be listened on"),
    ],
)
def test_the_command_says_one_sentence_and_whether_it_may_work_later(arguments: list[str], sentence: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == (75 if "-file" in sentence else 2)  # a Secret may get its key later
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_inspect_says_what_a_checkpoint_is() -> None:
    ended = run("inspect", SMOLLM2)
    assert ended.returncode == 0
    for part in ("LlamaForCausalLM", "30 of hidden size 576", "8192 tokens", "134.5 million", "with a chat template"):
        assert part in ended.stdout
    assert re.search(r"memory, float32 +538 MB weights, 46.1 kB KV a token, 377 MB a whole context", ended.stdout)
    refused = run("inspect", "/nowhere")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_help_names_every_flag_and_variable() -> None:
    ended = run("serve", "--help")
    assert ended.returncode == 0
    text = re.sub(r"\s+", " ", ended.stdout)
    assert all(flag in text for flag in (*EVERY_FLAG, "--no-overlap"))
    assert all(option.variable in text for option in (MODEL, *OPTIONS))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{ROOT}/engine", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-W", "error", "-m", "pilotfish_engine.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys, pilotfish_engine.cli; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": f"{ROOT}/engine", "PATH": os.environ["PATH"]}
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=False).returncode == 0
