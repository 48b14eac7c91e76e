"""Groups in a process without a default group, as torchft and tests of libraries make them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from new_ranks import run_in_new_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx

WORLD_SIZE = 2


class NameRaises(dist.ProcessGroup):
    """A group in Python, which passes its calls on, and whose name cannot be read."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner

    @property
    def group_name(self) -> str:
        raise ValueError("this group has no name")

    @property
    def group_desc(self) -> str:
        raise LookupError("this group has no description")

    def getBackendName(self) -> str:
        return "raises"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return self._inner.allreduce(tensors, options or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._inner.broadcast(tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._inner.allgather(outputs, inputs, options or dist.AllgatherOptions())


def make_group(kind: str, store: dist.Store, rank: int) -> dist.ProcessGroup:
    store = dist.PrefixStore(kind, store)
    group = dist.ProcessGroup(store, rank, WORLD_SIZE)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, WORLD_SIZE)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if kind == "named":
        group._set_group_name("mine")
    return NameRaises(group) if kind == "name raises" else group


def train(cls: Any, group: dist.ProcessGroup, rank: int, **options: Any) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = cls(module, process_group=group, **options)
    torch.manual_seed(rank)
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(6, 4)).square().sum().backward()
        model(torch.randn(6, 4)).square().sum().backward()
    return model


def _use_all(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD_SIZE)
    for kind in ("no name", "named", "name raises"):
        group = make_group(kind, store, rank)
        options: tuple[dict[str, Any], ...] = ({}, {"find_unused_parameters": True})
        for arguments in options:
            theirs = train(DistributedDataParallel, group, rank, **arguments)
            ours = train(ddpx.ReducerDDP, group, rank, **arguments)
            for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad), kind
        data = ours._get_ddp_logging_data()
        assert data["rank"] == rank
        assert data["world_size"] == WORLD_SIZE
        assert "rank" in repr(ours)
        with ddpx.record(ours, max_steps=2) as timeline:
            for _ in range(3):
                ours(torch.randn(6, 4)).square().sum().backward()
        assert len(timeline.steps) == 2
        timeline.export_chrome_trace(Path(folder) / f"{kind}-{rank}.json")
        os.environ["DDPX_TIMELINE"] = str(Path(folder) / f"{kind}-timeline")
        recorded = train(ddpx.ReducerDDP, group, rank)
        del os.environ["DDPX_TIMELINE"]
        del recorded
        with pytest.raises(RuntimeError, match="with the default process group"):
            ours.__getstate__()
        if dist.ProcessGroup.size(group) == WORLD_SIZE and kind != "name raises":
            assert [status.rank for status in ddpx.peer_status(ours)] == [0, 1]
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1"])


@pytest.mark.timeout(120)
def test_groups_without_a_default_group():
    with tempfile.TemporaryDirectory() as folder:
        run_in_new_ranks(_use_all, (folder,), WORLD_SIZE, limit_s=100)
        for kind in ("no name", "named", "name raises"):
            assert list((Path(folder) / f"{kind}-timeline").iterdir())
