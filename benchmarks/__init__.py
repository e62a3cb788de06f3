"""One command a table: `python -m benchmarks.NAME`. Timings are judged as ratios within one run."""

from pilotfish_engine.config import share_cores

share_cores()  # before torch is imported: what is measured waits as what is served waits
