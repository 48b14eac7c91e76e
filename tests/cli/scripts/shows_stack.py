"""Rank 0 prints the stack of rank 1."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpx

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
if dist.get_rank() == 0:
    print(ddpx.peer_stack(model, 1, timeout=30))
dist.barrier()
