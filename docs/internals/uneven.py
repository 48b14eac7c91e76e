"""Rank 0 has three batches, and rank 1 has one: in join(), rank 1 shadows rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import RankPool


def gradients(divide_by_initial_world_size: bool) -> str:
    model = ReducerDDP(nn.Linear(1, 1, bias=False))
    grads = []
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for _ in range(3 if dist.get_rank() == 0 else 1):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()  # the local gradient is 1
            grads.append(model.module.weight.grad.item())
    return f"gradients {grads}"


if __name__ == "__main__":
    with RankPool(2) as ranks:
        for initial in (True, False):
            print(f"divide_by_initial_world_size={initial}")
            for rank, text in enumerate(ranks.run(gradients, initial)):
                print(f"  rank {rank}: {text}")
