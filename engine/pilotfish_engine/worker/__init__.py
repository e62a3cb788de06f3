"""Target worker: batch → logits and hidden states on one rank. Knows nothing about queues, HTTP or stop strings."""
