"""Scripts whose last rank makes other collective calls over NCCL. They run on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fault_ranks import let_meet, mark
from mistakes import Outcome, outcome_of
from torch import nn

from ddpx import ReducerDDP

# What the last rank does. The other ranks sum 300,000 numbers, and broadcast 5.
MISTAKES = {
    "sums a tensor of another shape": "another all_reduce",
    "makes two calls in another order": "another order",
}


def make_mistake(name: str, wrap: type[nn.Module] = ReducerDDP) -> Outcome:
    """Trains, makes the mistake once, and trains on."""
    return outcome_of(_train, MISTAKES[name], wrap)


def _train(mistake: str, wrap: type[nn.Module]) -> None:
    model = wrap(nn.Linear(64, 64).cuda())
    inputs = torch.ones(2, 64, device="cuda")
    let_meet(model)
    for step in range(8):
        if step == 3:
            torch.cuda.synchronize()
            mark("fault")
            _make_calls(mistake, dist.get_rank() == dist.get_world_size() - 1)
        loss = model(inputs).sum()
        loss.backward()
        loss.item()


def _make_calls(mistake: str, is_odd: bool) -> None:
    many, few = torch.ones(300_000, device="cuda"), torch.ones(5, device="cuda")
    if mistake == "another all_reduce":
        dist.all_reduce(few if is_odd else many)
    elif is_odd:
        dist.broadcast(few, 0)
        dist.all_reduce(many)
    else:
        dist.all_reduce(many)
        dist.broadcast(few, 0)
