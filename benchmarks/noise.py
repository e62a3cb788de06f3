"""`python -m benchmarks.noise`: how often a sampled draft is accepted when it draws by the target's own noise.

Beside it stand the most probable token as the draft, the inverse CDF of one shared uniform number, and the ratio rule
of speculative sampling (Leviathan et al., 2023), whose Σ min(p, q) is the most that any rule reaches. The target is
SmolLM2-135M-Instruct, the draft a copy with noise in its weights. Chances, not timings: the machine does not matter.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from benchmarks import prompts, reference
from benchmarks.decode import encode
from pilotfish_engine.sampling.draw import SamplingRows, choose, draft_logits

WEIGHT_NOISE = 0.06  # of each tensor's standard deviation
POSITIONS = 160
DRAWS = 64  # of each position
TEMPERATURES = (0.7, 1.0)
RULES = ("most probable", "shared inverse CDF", "shared noise", "ratio rule")


def positions() -> tuple[Tensor, Tensor]:
    """Logits of target and draft, float32 [POSITIONS, V] each, after MT-bench's first prompts."""
    target = reference.smollm2(torch.float32)
    draft = copy.deepcopy(target)
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, weight in draft.named_parameters():
            if "norm" not in name:
                weight.add_(torch.randn_like(weight) * weight.std(), alpha=WEIGHT_NOISE)
        found: list[tuple[Tensor, Tensor]] = []
        for prompt in encode(prompts.chat(8)):
            ids = torch.tensor([prompt])
            found.append((target(ids).logits[0], draft(ids).logits[0]))
    both = [torch.cat(logits) for logits in zip(*found, strict=True)]
    step = both[0].shape[0] // POSITIONS
    return both[0][::step][:POSITIONS], both[1][::step][:POSITIONS]


def accepted(target: Tensor, draft: Tensor, temperature: float) -> dict[str, float]:
    """The chance by which each rule accepts a draft, mean over the positions."""
    p, q = (torch.softmax(logits / temperature, dim=1) for logits in (target, draft))
    count, vocabulary = p.shape
    agreed = {"shared noise": 0.0, "shared inverse CDF": 0.0}
    for draw in range(DRAWS):
        rows = SamplingRows(
            temperature=torch.full((count,), temperature),
            top_k=torch.full((count,), vocabulary),
            top_p=torch.ones(count),
            min_p=torch.zeros(count),
            seeds=torch.full((count,), draw),
            filtered=False,
        )
        at = torch.arange(count)
        same = choose(target, at, rows) == draft_logits(draft, at, rows).argmax(dim=1)
        agreed["shared noise"] += same.double().mean().item() / DRAWS
        uniform = torch.rand(count, 1)
        same = (p.cumsum(dim=1) < uniform).sum(dim=1) == (q.cumsum(dim=1) < uniform).sum(dim=1)
        agreed["shared inverse CDF"] += same.double().mean().item() / DRAWS
    picked = p.gather(1, q.argmax(dim=1, keepdim=True)).mean().item()
    return agreed | {"most probable": picked, "ratio rule": torch.minimum(p, q).sum(dim=1).mean().item()}


def main() -> None:
    target, draft = positions()
    print(f"{'temperature':14}" + "".join(f"{rule:>20}" for rule in RULES))
    for temperature in TEMPERATURES:
        found = accepted(target, draft, temperature)
        print(f"{temperature:<14}" + "".join(f"{found[rule]:20.3f}" for rule in RULES), flush=True)


if __name__ == "__main__":
    main()
