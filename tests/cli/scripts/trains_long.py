"""A training with several buckets, long enough for a search. Says when it ends by itself."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12))
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=25)
    for _ in range(int(sys.argv[1])):
        model.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
    print("the script has ended by itself")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
