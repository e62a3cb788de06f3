"""One command a table: `python -m benchmarks.NAME`. Timings are judged as ratios within one run.

Threads wait as torch's OpenMP has them wait by default, which is best for every row alone on the machine; a served
engine waits more politely (config.share_cores) and gives 2% less alone.
"""
