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
from benchmarks.acceptance import asked, calibration, guided, methods, nodes, speed, split
from benchmarks.acceptance.engines import Engines, device, where
from benchmarks.acceptance.section import Row, Run
from pilotfish_engine.errors import UsageError
from pilotfish_engine.source import default_name

HEAD = Path("examples/drafts/smollm2-135m-eagle3")
SECTIONS: dict[str, Callable[[Run], list[Row]]] = {
    "methods": methods.run,
    "nodes": nodes.run,
    "split": split.run,
    "calibration": calibration.run,
    "speed": speed.run,
    "guided": guided.run,
}
MOST_ROWS = {"cpu": 16, "cuda": 256}
PROMPTS = {"cpu": 3, "cuda": 80}  # of each kind
TOKENS = {"cpu": 24, "cuda": 256}


def parse(arguments: Sequence[str], place: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__)
    parser.add_argument("--target", default=SOURCE, help="the model, as `pilotfish-engine serve` takes it")
    parser.add_argument("--draft", type=Path, help=f"a head's folder (default: {HEAD}, if it is there)")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one (again for more)")
    parser.add_argument("--prompts", type=int, default=PROMPTS[place], help="of each kind (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS[place], help="of an answer at most (default: %(default)s)")
    parser.add_argument("--at-once", action="append", type=int, help="of speed: only so many requests (again for more)")
    parser.add_argument("--prompt-file", type=Path, help="prompts as token ids, where the packages are not installed")
    parser.add_argument("--write-prompts", type=Path, metavar="FILE", help="write such a file, and end")
    parser.add_argument("--out", type=Path, metavar="DIR", help="rows as JSON, and pictures")
    return parser.parse_args(arguments)


def keep(name: str, about: Row, rows: list[Row], out: Path) -> None:
    """A section's JSON, and its picture where matplotlib is installed."""
    (out / f"{name}.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    try:
        from benchmarks.acceptance.pictures import draw
    except ImportError as error:
        print(f"no picture: {error}")
    else:
        draw(name, rows, out / f"{name}.png")


def main() -> int:
    options = parse(sys.argv[1:], where())
    if options.prompt_file is None:
        wanted = asked.installed(options.target, options.prompts)
    else:
        wanted = asked.read(options.prompt_file).first(options.prompts)
    if options.write_prompts is not None:
        wanted.write(options.write_prompts)
        return 0
    draft = options.draft or (HEAD if HEAD.is_dir() else None)
    lengths = [len(prompt.token_ids) for prompt in wanted.mixed()]
    about = {
        "target": default_name(options.target),
        "head": str(draft),
        "device": device(),
        "torch": torch.__version__,
        "prompts": len(lengths),
        "tokens": options.tokens,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = min(len(lengths), MOST_ROWS[where()])
        engines = Engines(options.target, draft, wanted.corpus, lengths, options.tokens, rows, Path(folder))
        for name in options.section or SECTIONS:
            begun = time.monotonic()
            print(f"\n{name}", flush=True)
            found = SECTIONS[name](Run(engines, wanted, options.tokens, options.at_once))
            print(f"({time.monotonic() - begun:.0f} s)", flush=True)
            if options.out is not None:
                keep(name, about, found, options.out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"error: {error}")
