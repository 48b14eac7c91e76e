"""One rank: trains with ReducerDDP over gloo and shm, and with DDP, and saves all final weights."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import train
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

STEPS = 12


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shm = dist.new_group(backend="shm")
    wrappers = {
        "DDP over gloo": DistributedDataParallel,
        "ReducerDDP over gloo": ReducerDDP,
        "ReducerDDP with shm": lambda module: ReducerDDP(module, transport="shm"),
        "ReducerDDP over shm": lambda module: ReducerDDP(module, process_group=shm),
    }
    weights = {}
    for name, wrap in wrappers.items():
        module = train.train(wrap, torch.device("cpu"), STEPS, checkpoint=None)
        weights[name] = torch.cat([param.detach().flatten() for param in module.parameters()])
    hosts = shm._get_backend(torch.device("cpu")).hosts
    record = {"node": os.uname().nodename, "hosts": hosts, "weights": weights}
    torch.save(record, Path(sys.argv[1]) / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
