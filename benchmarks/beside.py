"""Compares another checkout with this one: `python -m benchmarks.beside OTHER [parts decode] [--pairs 3]`.

A checkout is a folder of this repository with its compiled parts in place (`python setup.py build_ext --inplace`). The
two run the same benchmark in turn, other first and this first by turns, each in a process of its own, so that a machine
whose speed drifts is equally fast for both. Of every figure it prints both medians and the median, least and most of
the pairs' ratios, this over other: of `parts` milliseconds, of `decode` tokens/s.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[1]
LINE = re.compile(r"(\S.*?)\s{2,}((?:\d+(?:\.\d+)?%?\s*)+)")
Figures = Mapping[tuple[str, int], float]  # by the row's name, and the number of the column


def figures(text: str) -> dict[tuple[str, int], float]:
    """Returns the numbers of every row of the tables in a benchmark's output; shares, which end in %, are left out."""
    found: dict[tuple[str, int], float] = {}
    for line in text.splitlines():
        if row := LINE.fullmatch(line):
            for column, number in enumerate(row[2].split()):
                if not number.endswith("%"):
                    found[row[1], column] = float(number)
    return found


def run(checkout: Path, benchmark: str) -> Figures:
    """Exit codes tell of bars that were missed; what counts here are the figures."""
    paths = os.pathsep.join(str(checkout / part) for part in ("engine", "operator", "."))
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}"],
        cwd=checkout, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found = figures(done.stdout)
    if not found:
        raise SystemExit(f"benchmarks.{benchmark} in {checkout} printed no figures (exit code {done.returncode})")
    return found


def table(pairs: Sequence[tuple[Figures, Figures]]) -> str:
    """pairs: of figures, (other's, this one's). Only what all have is compared."""
    both = [key for key in pairs[0][1] if all(key in one for pair in pairs for one in pair)]
    lines = [f"{'':32}{'column':>7}{'other':>10}{'this':>10}{'ratio':>8}{'least':>8}{'most':>8}"]
    for key in both:
        other, this = ([pair[which][key] for pair in pairs] for which in (0, 1))
        ratios = [b / a for a, b in zip(other, this, strict=True) if a]
        shown = "".join(f"{value:8.3f}" for value in (median(ratios), min(ratios), max(ratios))) if ratios else ""
        lines.append(f"{key[0]:32}{key[1]:7}{median(other):10.2f}{median(this):10.2f}{shown}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.beside", description=__doc__)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("benchmarks", nargs="*", default=["parts", "decode"], help="[parts decode]")
    parser.add_argument("--pairs", type=int, default=3, help="how often each runs [3]")
    flags = parser.parse_args()
    for benchmark in flags.benchmarks:
        pairs = []
        for number in range(flags.pairs):
            order = (flags.other.resolve(), HERE) if number % 2 == 0 else (HERE, flags.other.resolve())
            found = {checkout: run(checkout, benchmark) for checkout in order}
            pairs.append((found[flags.other.resolve()], found[HERE]))
            print(f"{benchmark}: pair {number + 1} of {flags.pairs}", file=sys.stderr, flush=True)
        print(f"\n{benchmark}, {flags.pairs} pairs\n{table(pairs)}", flush=True)


if __name__ == "__main__":
    main()
