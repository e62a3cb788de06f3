"""From logits to one token: filters and a draw keyed by (seed, position). Knows nothing about drafts or requests."""
