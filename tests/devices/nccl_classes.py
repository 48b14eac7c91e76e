"""Groups on the late device whose backends stand for the classes of NCCL, of several torches."""

from __future__ import annotations

import datetime
from typing import Any

import late_device
import torch
import torch.distributed as dist

# By the name that a user gives: the name of the class, and its type in the group.
BACKENDS = {
    "nccl before torch 2.15": ("nccl", "NCCL"),
    "nccl": ("nccl2", "NCCL"),
    "nccl2": ("nccl2", "CUSTOM"),
    "nccl-legacy": ("nccl", "CUSTOM"),
    "nccl-lazy": ("nccl-lazy", "CUSTOM"),
}
COUNTING = [name for name in BACKENDS if name != "nccl-lazy"]
TIMEOUT = datetime.timedelta(seconds=20)


def make_group(name: str) -> tuple[dist.ProcessGroup, Any]:
    """Returns a group of all ranks, and its backend."""
    class_name, type_name = BACKENDS[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    backend = late_device.make_backend(store, rank, size, TIMEOUT, class_name)
    kind = dist.ProcessGroup.BackendType.__members__[type_name]
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("late"), kind, backend)
    group._set_group_name(name)
    return group, backend
