"""A script that does not use timelines: trains, destroys its group, and ends or raises."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = ReducerDDP(nn.Linear(8, 8))
for _ in range(4):
    model(torch.ones(2, 8)).sum().backward()
if sys.argv[1:] == ["break"]:
    raise ArithmeticError("as asked")
dist.destroy_process_group()
