"""A small training. ``--spoil STEP`` makes it differ under ReducerDDP, ``--unseeded`` always."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--spoil", type=int, help="a step, from 1")
    parser.add_argument("--unseeded", action="store_true")
    parser.add_argument("--accumulate", action="store_true")
    return parser.parse_args()


def spoil(model: DDP) -> None:
    """Changes a gradient on rank 1 only after synchronization, as an incorrect reducer would."""
    if type(model).__module__.startswith("ddpx.") and dist.get_rank() == 1:
        weight = model.module[2].weight

        def damage(param: torch.Tensor) -> None:
            param.grad[0, 1] += 0.5
            handle.remove()

        handle = model.register_post_sync_hook(weight, damage)


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    if not args.unseeded:
        torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, args.num_steps + 1):
        optimizer.zero_grad()
        if args.accumulate:
            with model.no_sync():
                model(torch.randn(4, 6)).square().mean().backward()
        if step == args.spoil:
            spoil(model)
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
