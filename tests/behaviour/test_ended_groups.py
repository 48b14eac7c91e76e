"""A module whose process group has ended is wrapped again, while the old wrapper still exists."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from new_ranks import run_in_new_ranks
from slow_ddp import MODES, Net, SlowDDP, assert_same, build_same, data, loss_of
from torch import nn

from ddpx import ReducerDDP

ROUNDS = 4
Make = Callable[[dist.Store, int], dist.ProcessGroup]


def _default(store: dist.Store, rank: int) -> dist.ProcessGroup:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _new_group(store: dist.Store, rank: int) -> dist.ProcessGroup:
    _default(store, rank)
    group = dist.new_group()
    assert group is not None
    return group


def _by_hand(store: dist.Store, rank: int) -> dist.ProcessGroup:
    """A group that torch does not know."""
    group = dist.ProcessGroup(store, rank, 2)
    gloo = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _abort() -> None:
    dist.distributed_c10d._abort_process_group()


ENDS: dict[str, tuple[Make, Callable[[], None]]] = {
    "default group": (_default, _destroy),
    "new group": (_new_group, _destroy),
    "group made by hand": (_by_hand, _destroy),
    "aborted group": (_default, _abort),
}


def _steps(model: ReducerDDP, slow: SlowDDP, group: dist.ProcessGroup, num_steps: int) -> None:
    for number in range(num_steps):
        for each in (model, slow):
            each.zero_grad()
            seed_of(group, number)
            loss_of(each(data())).backward()
        for param in slow.parameters():
            assert param.grad is not None
            group.allreduce([param.grad]).wait()
            param.grad /= 2
        assert_same(model, slow)


def seed_of(group: dist.ProcessGroup, number: int) -> None:
    torch.manual_seed(7919 * (number + 1) + group.rank())


def _usage() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _rounds(rank: int, file: str, end: str, mode: str, unfinished: bool) -> None:
    torch.set_num_threads(1)
    make, finish = ENDS[end]
    store = dist.FileStore(file, 2)
    module = build_same(Net)
    slow = _Bare(module)
    kept: list[Any] = []
    usages = []
    for number in range(ROUNDS):
        group = make(dist.PrefixStore(str(number), store), rank)
        model = ReducerDDP(module, process_group=group, **MODES[mode])
        _steps(model, slow, group, 4)
        kept.append(model)
        if unfinished:
            model(data())  # has no backward
        group.barrier().wait()
        finish()
        del group
        gc.collect()
        time.sleep(0.5)  # the watchdog looks for groups that are gone five times a second
        usages.append(_usage())
    if end == "group made by hand":
        return  # nobody tells that such a group has ended, so its wrapper keeps it
    most = [max(usage[i] for usage in usages[:2]) for i in range(2)]
    assert usages[-1][0] <= most[0] and usages[-1][1] <= most[1], usages
    assert "rank" in repr(kept[0])
    with pytest.raises(RuntimeError, match="a later ReducerDDP averages the parameters"):
        loss_of(kept[0](data())).backward()


class _Bare(SlowDDP):
    """The same module with gradients of its own: the hooks of wrappers stay on the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(build_same(Net))
        self.load_state_dict({f"module.{name}": t for name, t in module.state_dict().items()})


def _run(file: Path, *args: Any) -> None:
    run_in_new_ranks(_rounds, (str(file), *args))


@pytest.mark.parametrize("mode", ["default", "view", "static", "unused-view"])
def test_destroyed_default_group(mode: str, tmp_path: Path) -> None:
    _run(tmp_path / "store", "default group", mode, False)


@pytest.mark.parametrize("end", [end for end in ENDS if end != "default group"])
def test_other_groups(end: str, tmp_path: Path) -> None:
    _run(tmp_path / "store", end, "default", False)


def test_a_forward_without_backward(tmp_path: Path) -> None:
    _run(tmp_path / "store", "default group", "view", True)


def test_buffers_over_a_group_that_has_ended(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        older = ReducerDDP(module, process_group=group)
        dist.destroy_process_group(group)
        newer = ReducerDDP(module)
        with pytest.raises(RuntimeError, match="has ended, and a later ReducerDDP averages"):
            older(torch.ones(3, 2))
        newer(torch.ones(3, 2)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_a_step_that_was_not_finalized(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        module = nn.Linear(2, 2)
        older = ReducerDDP(module, process_group=group)
        older.require_manual_backward_finalization = True
        older(torch.ones(1, 2)).sum().backward()
        assert older.reducer.phase.name == "READY"
        dist.destroy_process_group(group)
        newer = ReducerDDP(module)
        newer.zero_grad()
        newer(torch.ones(1, 2)).sum().backward()
        assert torch.equal(module.weight.grad, torch.ones(2, 2))
    finally:
        dist.destroy_process_group()
