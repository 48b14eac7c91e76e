"""A training whose steps are all alike, for comparisons. ``--more`` lengthens the computation."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-steps", type=int, default=30)
    parser.add_argument("--more", type=int, default=0, help="rows added to the 64 of a batch")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64 + args.more, 512)
    for _ in range(args.num_steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
