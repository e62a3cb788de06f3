"""The command: what is asked, of which engines, and where the rows and pictures go."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import SOURCE
from benchmarks.acceptance import asked, calibration, methods, nodes, split
from benchmarks.acceptance.engines import Engines, device
from benchmarks.acceptance.section import Row, Run
from pilotfish_engine.errors import UsageError
from pilotfish_engine.source import default_name

HEAD = Path("examples/drafts/smollm2-135m-eagle3")
SECTIONS: dict[str, Callable[[Run], list[Row]]] = {
    "methods": methods.run,
    "nodes": nodes.run,
    "split": split.run,
    "calibration": calibration.run,
}
MOST_ROWS = {"cpu": 16, "cuda": 256}
PROMPTS = {"cpu": 6, "cuda": 80}  # of each kind
TOKENS = {"cpu": 48, "cuda": 256}


def parse(arguments: Sequence[str], where: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__)
    parser.add_argument("--target", default=SOURCE, help="the model, as `pilotfish-engine serve` takes it")
    parser.add_argument("--draft", type=Path, help=f"a head's folder (default: {HEAD}, if it is there)")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one (again for more)")
    parser.add_argument("--prompts", type=int, default=PROMPTS[where], help="of each kind (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS[where], help="of an answer at most (default: %(default)s)")
    parser.add_argument("--prompt-file", type=Path, help="prompts as token ids, where the packages are not installed")
    parser.add_argument("--write-prompts", type=Path, metavar="FILE", help="write such a file, and end")
    parser.add_argument("--out", type=Path, metavar="DIR", help="rows as JSON, and pictures")
    return parser.parse_args(arguments)


def main() -> int:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(sys.argv[1:], where)
    read = asked.installed(options.target, options.prompts) if options.prompt_file is None else None
    wanted = (read or asked.read(options.prompt_file)).first(options.prompts)
    if options.write_prompts is not None:
        wanted.write(options.write_prompts)
        return 0
    draft = options.draft or (HEAD if HEAD.is_dir() else None)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    lengths = [len(prompt.token_ids) for prompt in wanted.mixed()]
    count, longest = len(lengths), max(lengths) + options.tokens
    print(
        f"{default_name(options.target)}, head {draft}, {device()}, {count} prompts, answers of {options.tokens} tokens"
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = min(count, MOST_ROWS[where])
        engines = Engines(options.target, draft, wanted.corpus, longest, sum(lengths), rows, Path(folder))
        for name in options.section or SECTIONS:
            begun = time.monotonic()
            print(f"\n{name}")
            found = SECTIONS[name](Run(engines, wanted, options.tokens))
            print(f"({time.monotonic() - begun:.0f} s)", flush=True)
            if options.out is not None:
                about = {"target": options.target, "head": str(draft), "device": device(), "torch": torch.__version__}
                about |= {"prompts": count, "tokens": options.tokens}
                (options.out / f"{name}.json").write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"error: {error}")
