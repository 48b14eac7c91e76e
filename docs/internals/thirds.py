"""Compares bits at three ranks: product or quotient, and the order of the sum."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import RankPool

NUM_RANKS = 3
CHUNK = 342  # elements; how gloo's ring cuts 1,024 floats for 3 ranks (the last chunk has 340)


def ring_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Chunk c is summed as ((g[c-1] + g[c-2]) + g[c-3]), indices modulo 3."""
    total = torch.empty_like(parts[0])
    for chunk in range(NUM_RANKS):
        where = slice(chunk * CHUNK, None if chunk == NUM_RANKS - 1 else (chunk + 1) * CHUNK)
        a, b, c = (parts[(chunk - hop) % NUM_RANKS][where] for hop in (1, 2, 3))
        total[where] = (a + b) + c
    return total


def bits() -> list[str]:
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(1, 1024)
    everyone = [torch.empty_like(inputs) for _ in range(NUM_RANKS)]
    dist.all_gather(everyone, inputs)
    grads = [x.flatten() for x in everyone]  # d(weight @ x) / d(weight) = x
    model = ReducerDDP(nn.Linear(1024, 1, bias=False))
    model(inputs).sum().backward()
    ours = model.module.weight.grad.flatten()

    def compare(how: str, expected: torch.Tensor) -> str:
        return f"{how:<46}{int((ours != expected).sum()):>5} of 1024 differ"

    by_rank = [g * (1 / 3) for g in grads]
    return [
        compare("multiplied by 1/3, then gloo's order:", ring_sum(by_rank)),
        compare("divided by 3, then gloo's order:", ring_sum([g / 3 for g in grads])),
        compare("multiplied by 1/3, then rank 0 + 1 + 2:", by_rank[0] + by_rank[1] + by_rank[2]),
        compare("gloo's order, then divided by 3:", ring_sum(grads) / 3),
    ]


if __name__ == "__main__":
    with RankPool(NUM_RANKS) as ranks:
        print("\n".join(ranks.run(bits)[0]))
