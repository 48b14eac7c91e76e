"""A training of a module without a wrapper, by ddpx.replicate()."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import ddpx


def main() -> None:
    dist.init_process_group("gloo")
    model = ddpx.replicate(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))
    for _ in range(6):
        model.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
