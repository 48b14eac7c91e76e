"""Gloo with one thread.

torch's gloo has two threads, which corrupt memory if a sparse all-reduce runs beside another
operation: see docs/divergences.md, "Sparse gradients over gloo".
"""

from __future__ import annotations

import functools
from datetime import timedelta
from unittest import mock

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ddpx.comm.shm import one_thread_options


class OneThreadGloo(dist.ProcessGroupGloo):
    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object
    ) -> None:
        # torch 2.14 and newer pass further arguments, with the values of their defaults.
        super().__init__(store, rank, size, one_thread_options(timeout))


@functools.cache
def one_thread_group() -> dist.ProcessGroup:
    """A group of all ranks. Cached, since the group is created collectively."""
    with mock.patch.object(c10d, "ProcessGroupGloo", OneThreadGloo):
        group = dist.new_group(backend="gloo")
    assert group is not None
    return group
