"""A script that uses ReducerDDP itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP


def main() -> None:
    dist.init_process_group("gloo")
    model = ReducerDDP(nn.Linear(6, 3))
    for _ in range(5):
        model(torch.ones(4, 6)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
