"""The options that all adapters of trainers add, without a trainer library."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.integrations.options import WrapOptions, init_group
from ddpx.timeline import Timeline


def _make() -> nn.Module:
    return DistributedDataParallel(nn.Linear(4, 2))


def _make_compiled() -> Any:
    """As Accelerate does with ``dynamo_backend``, and Trainer with ``torch_compile``."""
    return torch.compile(_make(), backend="eager")


def _train(make: Any, folder: Path) -> None:
    model = WrapOptions(folder, timeline_steps=2).wrap(make)
    for _ in range(4):
        model(torch.ones(3, 4)).sum().backward()
    del model
    torch.compiler.reset()
    gc.collect()  # writes the files
    dist.barrier()


@pytest.mark.parametrize("make", [_make, _make_compiled])
def test_the_steps_of_all_ranks_are_recorded(ranks, tmp_path, make):
    ranks(2).run(_train, make, tmp_path)
    steps = Timeline.load(tmp_path).steps
    assert [sorted(step.ranks) for step in steps] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("number", [0, -1, 2.5, True, "3"])
def test_a_wrong_number_of_steps_is_an_error(number):
    with pytest.raises(ValueError, match=r"timeline_steps=.* is not a positive number of steps"):
        WrapOptions("runs/timeline", timeline_steps=number)


def test_a_number_of_steps_needs_a_folder():
    with pytest.raises(ValueError, match="timeline_steps=3 needs a folder: pass timeline="):
        WrapOptions(timeline_steps=3)


def test_an_existing_group_is_kept(tmp_path, monkeypatch):
    """A launcher has set WORLD_SIZE."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        init_group("shm")
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_without_a_launcher_there_is_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    init_group("gloo")  # would wait for variables of a launcher, or raise
    assert not dist.is_initialized()
