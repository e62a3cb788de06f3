"""One command a table: `python -m benchmarks.NAME`. Timings are judged as ratios within one run."""
