"""Shows which backwards average. Outputs that a backward reaches decide, or its first gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import RankPool


def gradients() -> list[str]:
    model = ReducerDDP(nn.Linear(1, 1, bias=False))
    weight, lines = model.module.weight, []
    x = torch.full((1, 1), 1.0 + 2 * dist.get_rank())  # the gradient: 1 on rank 0, 3 on rank 1

    def add_line(what: str) -> None:
        steps = model.reducer.report.step + 1
        lines.append(f"{what:<42}grad {weight.grad.item():g}, {steps} synchronized")

    with model.no_sync():
        model(x).sum().backward()
    add_line("forward and backward in no_sync()")
    model(x).sum().backward()
    add_line("a second one outside")
    model.zero_grad()
    with model.no_sync():
        output = model(x)
    output.sum().backward()
    add_line("forward alone in no_sync()")
    model.zero_grad()
    output = model(x)
    with model.no_sync():
        output.sum().backward()
    add_line("backward alone in no_sync()")
    return lines


if __name__ == "__main__":
    with RankPool(2) as ranks:
        for rank, lines in enumerate(ranks.run(gradients)):
            print(f"rank {rank}", *lines, sep="\n  ")
