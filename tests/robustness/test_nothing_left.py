"""After the last wrapper and process group are gone, a process has no thread or file of ddpx."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from new_ranks import run_in_new_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import ReducerDDP

# The watchdog looks for groups that are gone five times a second.
_SETTLE_S = 5.0
CASES: dict[str, dict[str, Any]] = {
    "shared memory beside gloo": {},
    "gloo alone": {"transport": "group"},
    "backend shm": {"backend": "shm"},
    "recorded": {"recorded": True},
    "late rank": {"late_s": 0.5},
    "failed rank": {"fails": True},
    "several groups": {"num_groups": 3},
}


def _tasks() -> Counter[str]:
    names: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        try:
            names[(task / "comm").read_text().strip()] += 1
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
    return names


def _files() -> Counter[str]:
    """What descriptors and mappings refer to, without numbers of sockets."""
    files: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            files[os.readlink(f"/proc/self/fd/{entry}").partition(":[")[0]] += 1
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and ("memfd:" in path[0] or path[0].startswith("/dev/shm")):
            files[f"mapped {path[0]}"] += 1
    return files


def _held() -> tuple[Counter[str], Counter[str], set[str]]:
    gc.collect()
    threads = {thread.name for thread in threading.enumerate()}
    return _tasks(), _files(), threads


def _train(cls: Any, rank: int, **options: Any) -> nn.Module:
    model: nn.Module = cls(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), **options)
    for _ in range(4):
        model(torch.ones(3, 8) * rank).sum().backward()
    return model


def _use(
    cls: Any,
    store: dist.Store,
    rank: int,
    backend: str = "gloo",
    transport: str | None = None,
    recorded: bool = False,
    late_s: float = 0.0,
    fails: bool = False,
    num_groups: int = 1,
) -> None:
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    options = {} if transport is None else {"transport": transport}
    groups = [dist.new_group() for _ in range(num_groups - 1)]
    models = [_train(cls, rank, process_group=group, **options) for group in [None, *groups]]
    if recorded:
        with ddpx.record(models[0]):
            models[0](torch.ones(3, 8)).sum().backward()
    if late_s:
        ddpx.set_stall_timeout(warn=late_s / 2, stacks=True)
        time.sleep(late_s * rank)
        models[0](torch.ones(3, 8)).sum().backward()
    if fails:
        dist.barrier()
        if rank == 1:  # its group is gone, and rank 0 finds no peer
            models.clear()
            gc.collect()
            dist.destroy_process_group()
            return
        with pytest.raises(ddpx.RankFailure):
            for _ in range(1000):
                models[0](torch.ones(3, 8)).sum().backward()
    if not fails:
        dist.barrier()
    if cls is DistributedDataParallel:
        models.clear()  # the last owner of a group joins gloo's threads with the GIL, and may hang
    dist.destroy_process_group()


def _check(rank: int, file: str, case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(file, 2)
    # torch's own threads, caches and files exist from here on.
    _use(DistributedDataParallel, dist.PrefixStore("ddp", store), rank)
    before = _held()
    for number in range(2):
        _use(ReducerDDP, dist.PrefixStore(str(number), store), rank, **case)
        deadline = time.monotonic() + _SETTLE_S
        while (left := _left_over(before)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"rank {rank}, round {number}: {left}"


def _left_over(before: tuple[Counter[str], Counter[str], set[str]]) -> str:
    now = _held()
    found = [*(now[0] - before[0]).elements(), *(now[1] - before[1]).elements()]
    return ", ".join([*found, *(now[2] - before[2])])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_threads_and_files(case: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    run_in_new_ranks(_check, (str(tmp_path / "store"), CASES[case]))
    assert {name for name in set(os.listdir("/dev/shm")) - before if "ddpx" in name} == set()
