"""Params without a gradient: an error with their names, or find_unused_parameters.

Every step uses the branch `a`. The ranks that use `b` differ from step to step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import RankPool

# Which ranks use `b`, step by step.
USERS: tuple[tuple[int, ...], ...] = ((0, 1), (), (), (1,), (0, 1))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 1, bias=False)
        self.b = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor, with_b: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if with_b else self.a(x)


def default_mode() -> str:
    model, rank = ReducerDDP(Branches()), dist.get_rank()
    model(torch.ones(1, 2), True).sum().backward()
    model.zero_grad()
    try:
        model(torch.ones(1, 2), rank == 1).sum().backward()
        outcome = "no error"
    except RuntimeError as error:
        outcome = str(error).split(".weight")[0] + ".weight' ..."
    return f"b.grad = {model.module.b.weight.grad.tolist()}, {outcome}"


def find_unused() -> list[str]:
    model = ReducerDDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0)
    lines = []
    for number, users in enumerate(USERS):
        model.zero_grad()
        model(torch.ones(1, 2), dist.get_rank() in users).sum().backward()
        grad = model.module.b.weight.grad
        lines.append(
            f"step {number}: used by {model.reducer.used_by_ranks} ranks, "
            f"{model.reducer.report.num_launches} all-reduces, "
            f"b.grad = {grad if grad is None else grad.tolist()}"
        )
    return lines


if __name__ == "__main__":
    with RankPool(2) as ranks:
        for rank, text in enumerate(ranks.run(default_mode)):
            print(f"default mode, rank {rank}: {text}")
        print("\n".join(ranks.run(find_unused)[0]))
