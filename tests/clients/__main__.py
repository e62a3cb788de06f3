"""`python -m tests.clients [CLIENT …]`: each client runs its session against a server; a table; 1 when one failed.

--record: against the stub instead, and its requests become the fixtures that test_sessions.py replays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients import environments, stub
from tests.clients.model import random_model, tokenizer_folder, with_tools
from tests.engine.server.serving import free_port, launched

SCRIPTS = Path(__file__).with_name("scripts")
SESSIONS = Path(__file__).with_name("sessions")
# Small enough that a queue can be full.
FLAGS = ("--max-running-requests", "4", "--max-waiting-requests", "8")
# Asks without limits, and reads no answer: a random model that ends soon does.
FORM_ALONE = ("llm-comply",)
SECONDS = 900  # of one client's session

Results = list[tuple[str, str, str | None]]  # client, scenario, what went wrong


async def talk(client: str, url: str, tokenizer: Path, *flags: str) -> Results:
    """Runs a client's scenarios, and tells each as it ends. A session that ends early counts as failed."""
    python = environments.python_of(client)
    script = SCRIPTS / f"with_{client.replace('-', '_')}.py"
    process = await asyncio.create_subprocess_exec(
        str(python), str(script), url + "/v1", stub.MODEL, str(tokenizer), *flags,
        stdout=asyncio.subprocess.PIPE, env=_surroundings(), cwd=environments.WORK,
    )  # fmt: skip
    results: Results = []

    def tell(scenario: str, error: str | None) -> None:
        results.append((client, scenario, error))
        sys.stdout.write(f"{client:17} {scenario:55} {'passed' if error is None else 'FAILED  ' + error}\n")
        sys.stdout.flush()

    assert process.stdout is not None
    try:
        async with asyncio.timeout(SECONDS):
            async for line in process.stdout:
                if line.startswith(b'{"scenario"'):
                    told = json.loads(line)
                    tell(told["scenario"], told["error"])
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    if process.returncode != 0 or not results:
        tell("the whole session", f"ended with {process.returncode}")
    return results


def _surroundings() -> dict[str, str]:
    """What a client finds in its environment: no keys, no proxies, no network."""
    home = environments.WORK / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {
        "PATH": os.environ["PATH"], "HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


async def record(clients: list[str], tokenizer: Path) -> Results:
    results: Results = []
    for client in clients:
        recorder = stub.Stub()
        async with stub.running(recorder) as url:
            results += await talk(client, url, tokenizer, "--announce")
        lines = [json.dumps(request, ensure_ascii=False) + "\n" for request in recorder.records]
        (SESSIONS / f"{client}.jsonl").write_text("".join(lines))
    return results


@contextmanager
def server(model: Path, context: int) -> Iterator[str]:
    """A server whose context is small enough that a prompt can be too long; its URL."""
    port, folder = free_port(), environments.WORK / "server"
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "pilotfish_engine.cli", "serve", str(model),
        "--port", str(port), "--served-name", stub.MODEL, "--max-model-len", str(context), *FLAGS,
    ]  # fmt: skip
    with launched(command, port, folder) as started:
        yield started.url


async def ask_servers(clients: list[str], tokenizer: Path) -> Results:
    results: Results = []
    for model, context, held_to_form in ((with_tools, 2048, False), (random_model, 1024, True)):
        if chosen := [client for client in clients if (client in FORM_ALONE) == held_to_form]:
            with server(model(environments.WORK), context) as url:
                results += [result for client in chosen for result in await talk(client, url, tokenizer)]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(environments.names()))
    parser.add_argument("--record", action="store_true", help="against the stub; requests become fixtures")
    chosen = parser.parse_args()
    if unknown := set(chosen.clients) - set(environments.names()):
        parser.error(f"{sorted(unknown)} are no clients; {', '.join(environments.names())} would work")
    environments.WORK.mkdir(parents=True, exist_ok=True)
    SESSIONS.mkdir(exist_ok=True)
    clients, tokenizer = chosen.clients or environments.names(), tokenizer_folder(environments.WORK)
    results = asyncio.run((record if chosen.record else ask_servers)(clients, tokenizer))
    failed = sum(error is not None for _, _, error in results)
    sys.stdout.write(f"{len(results) - failed} passed, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
