"""Shows when buckets are rebuilt, and by which order.

The layers run in another order than they are registered. A static graph rebuilds one step later,
and find_unused_parameters never rebuilds.
"""

from __future__ import annotations

import torch
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import RankPool


class OutOfOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(16, 16, bias=False)
        self.a = nn.Linear(16, 16, bias=False)
        self.b = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


def plans(**options: bool) -> list[str]:
    model = ReducerDDP(OutOfOrder(), bucket_cap_mb=0.0015, **options)
    names = [name.removesuffix(".weight") for name, _ in model.module.named_parameters()]
    lines = []
    for number in range(4):
        output = model(torch.ones(2, 16))  # this forward rebuilds the buckets if that is due
        plan = [[names[i] for i in members] for members in model.reducer.plan.buckets]
        lines.append(f"  step {number}: {' '.join('+'.join(bucket) for bucket in plan)}")
        output.sum().backward()
    order = [names[i] for i in model.reducer.arrival_order]
    lines.append(f"  rebuilt by this order: {' '.join(order) or 'never'}")
    return lines


if __name__ == "__main__":
    with RankPool(2) as ranks:
        for title, options in (
            ("default", {}),
            ("static_graph", {"static_graph": True}),
            ("find_unused_parameters", {"find_unused_parameters": True}),
        ):
            print(title)
            print("\n".join(ranks.run(plans, **options)[0]))
