"""The process groups after ``ddpx.shrink``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from mortal_jobs import Job, Kill, Net, die, run_job
from torch.distributed import distributed_c10d as c10d

import ddpx
from ddpx.elastic.regroup import Regrouping, destroy_groups

JOB = Job(3, "gloo", 3, (Kill(1, 1, "forward"),))
TIMEOUT = timedelta(seconds=33)


def _shrunk(model: ddpx.ReducerDDP) -> ddpx.Shrunk:
    if dist.get_rank() == 1:
        die()
    with pytest.raises(ddpx.RankFailure):
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ddpx.RankFailure):  # the averages may be wrong
        ddpx.wait_for_gradients(model)
    return ddpx.shrink(model, step=0)


def _transport(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    assert model.reducer.transport == "shm"
    _shrunk(model)
    assert model.process_group is dist.group.WORLD
    return model.reducer.transport


def test_the_new_group_has_a_transport():
    """Beside a gloo group, shared memory moves buckets."""
    assert set(run_job(JOB, _transport).values()) == {"shm"}


def _own_group(job: Job, rank: int) -> tuple[object, ...]:
    options = ddpx.ShmOptions(order="fixed")
    group = dist.new_group(backend="shm", timeout=TIMEOUT, pg_options=options)
    model = ddpx.ReducerDDP(Net(), process_group=group)
    assert _shrunk(model).world_size == 2
    assert model.process_group is not dist.group.WORLD
    backend: Any = model.process_group._get_backend(torch.device("cpu"))
    names = dist.get_backend(), dist.get_backend(model.process_group)
    return *names, backend.order.name, backend.timeout


def test_a_group_of_its_own_keeps_its_arguments():
    expected = ("gloo", "shm", "FIXED", TIMEOUT)
    assert set(run_job(JOB, _own_group).values()) == {expected}


def test_names_of_new_groups_count_from_0():
    """An attempt that failed may have counted a group on this rank only."""
    c10d._world.group_count = 3
    destroy_groups()
    assert c10d._world.group_count == 0


def test_an_attempt_after_the_groups_are_destroyed():
    with pytest.raises(RuntimeError, match=r"could not make a process group of the surviving"):
        Regrouping(cast(dist.ProcessGroup, object()))
