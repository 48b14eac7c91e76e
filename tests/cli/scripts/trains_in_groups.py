"""Two groups of two ranks train models of their own. All ranks exchange their losses."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    number = dist.get_rank() // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][number]
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range((12, 20)[number]))
    model = DDP(nn.Sequential(*layers), process_group=group)
    for _ in range(int(sys.argv[1])):
        model.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach())
    print("the script has ended by itself")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
