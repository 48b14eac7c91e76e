"""The tools of ddpx.testing find differences, and report ranks that fail."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import (
    RankFailed,
    RankPool,
    Trace,
    compare_traces,
    compare_with_ddp,
    record_training,
)


def _step(model: nn.Module, number: int) -> None:
    model(torch.randn(8, 16)).square().mean().backward()


def _build() -> nn.Module:
    return nn.Linear(16, 4)


def _compare() -> None:
    comparison = compare_with_ddp(_build, _step, gradient_as_bucket_view=True)
    comparison.raise_if_different()
    assert comparison.num_tensors == 5 * 4


def test_compare_with_ddp(ranks):
    ranks(2).run(_compare)


def _nudged(model: nn.Module, number: int) -> None:
    """Differs from _step in one bit of one gradient, in step 2 on rank 1."""
    _step(model, number)
    if number == 2 and dist.get_rank() == 1:
        grad = model.module.bias.grad
        grad[3] = torch.nextafter(grad[3], torch.tensor(torch.inf))


def _find_the_bit() -> list[str]:
    expected = record_training(_build, ReducerDDP, _step, num_steps=3)
    actual = record_training(_build, ReducerDDP, _nudged, num_steps=3)
    return [d for d in compare_traces(expected, actual).differences if "gradient" in d]


def test_one_bit_is_found(ranks):
    on_rank_0, on_rank_1 = ranks(2).run(_find_the_bit)
    assert on_rank_0 == []
    assert len(on_rank_1) == 1
    assert "step 2: gradient of module.bias differs in 1 of 4 elements" in on_rank_1[0]


@pytest.mark.parametrize(
    "left, right, expected",
    [
        (torch.tensor(0.0), torch.tensor(-0.0), "differs in 1 of 1 element,"),
        (torch.ones(2), None, "is dense against None"),
        (torch.ones(2), torch.ones(2).double(), "has dtype torch.float32 against torch.float64"),
        (torch.ones(2, 2), torch.ones(4), r"has shape \(2, 2\) against \(4,\)"),
        (torch.ones(2, 3), torch.ones(3, 2).t(), r"has strides \(3, 1\) against \(1, 2\)"),
        (torch.ones(2), torch.ones(2).to_sparse(), "is dense against sparse"),
    ],
    ids=["signed zero", "missing", "dtype", "shape", "strides", "layout"],
)
def test_kinds_of_difference(left, right, expected):
    comparison = compare_traces(Trace(({"x": left},)), Trace(({"x": right},)))
    assert not comparison.identical
    with pytest.raises(AssertionError, match=f"step 0: x {expected}"):
        comparison.raise_if_different()


def test_lengths_differ():
    comparison = compare_traces(Trace(({},)), Trace(({}, {})))
    assert comparison.differences == ("1 step against 2",)


def test_nan_equals_itself():
    trace = Trace(({"x": torch.tensor([float("nan"), 1.0]), "y": None},))
    assert compare_traces(trace, trace).identical


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("out of cheese")
    dist.barrier()


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def _crash_on_rank_1() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def _unpicklable() -> object:
    return lambda: None


def _sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def _rank() -> int:
    return dist.get_rank()


def test_failing_ranks_are_reported_and_replaced():
    with RankPool(2) as pool:
        assert pool.run(_rank) == [0, 1]
        with pytest.raises(RankFailed, match=r"(?s)rank 1: Traceback.*out of cheese"):
            pool.run(_raise_on_rank_1)
        with pytest.raises(RankFailed, match="rank 1: died, exit code 3"):
            pool.run(_die_on_rank_1)
        with pytest.raises(RankFailed, match=r"(?s)rank 1: died, exit code -11.*_crash_on_rank_1"):
            pool.run(_crash_on_rank_1)
        with pytest.raises(RankFailed, match="pickle"):
            pool.run(_unpicklable)
        start = time.monotonic()
        with pytest.raises(RankFailed, match=r"rank 1: did not return \(_sleep_on_rank_1"):
            pool.run(_sleep_on_rank_1, timeout=4)
        assert time.monotonic() - start < 30
        assert pool.run(_rank) == [0, 1]


def test_bad_world_size():
    with pytest.raises(ValueError, match="world_size must be 1 or more"):
        RankPool(0)


# Runs in a process of its own. Records questions for CUDA devices, and operators: the first
# operator initializes CUDA under TORCH_CUDA_SANITIZER=1. The assignments make torch believe that it
# supports CUDA.
_IMPORTS_OF_THE_SERVER = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from ddpx.testing.rank_pool import PRELOADED

found = []
torch._C._cuda_getDeviceCount = lambda: found.append("device count") or 1
torch._C._cuda_getCurrentRawStream = lambda index: found.append("stream") or 0
torch._C._has_cuda = True
torch.version.cuda = "13.0"
torch.cuda._lazy_init = lambda: found.append("initialization")

class Record(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found.append(str(function))
        return function(*args, **(kwargs or {}))

assert torch.cuda.is_available() and found.pop() == "device count"
with Record():
    for name in PRELOADED:
        __import__(name)
print(found)
"""


def test_the_fork_server_leaves_cuda_alone():
    """A fork of a process that has counted CUDA devices cannot use CUDA."""
    command = [sys.executable, "-c", _IMPORTS_OF_THE_SERVER]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
