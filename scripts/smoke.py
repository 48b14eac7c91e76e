"""Trains a few steps with an installed ddpx on 2 ranks, over gloo and shm. Compares with DDP.

    python scripts/smoke.py

Tests the ddpx that the interpreter finds. Needs only torch and ddpx.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx.testing import RankPool

NUM_STEPS = 5


def train(wrapper: type[nn.Module], **options: bool) -> list[torch.Tensor]:
    """Trains, and returns the final weights."""
    torch.manual_seed(0)
    model = wrapper(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(NUM_STEPS):
        inputs = torch.randn(4, 8) + torch.distributed.get_rank()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def check() -> None:
    expected = train(DistributedDataParallel)
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        for weight, other in zip(train(ddpx.ReducerDDP, **options), expected, strict=True):
            assert torch.equal(weight, other), options


def main() -> int:
    for backend in ("gloo", "shm"):
        with RankPool(2, backend) as ranks:
            ranks.run(check)
    where = Path(ddpx.__file__).parent
    print(f"ddpx {ddpx.__version__} in {where}, torch {torch.__version__}: the same bits as DDP")
    return 0


if __name__ == "__main__":
    sys.exit(main())
