"""Ranks on several hosts, by injected identities: results equal gloo's, and deaths are reported."""

from __future__ import annotations

import copy
import functools
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mortal_ranks import die, error_of, run_mortal
from torch import nn

import ddpx

LAYOUTS = ["aabb", "aaab", "abc", "abab"]  # a letter per rank names its host
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX]


@functools.cache
def _shm(layout: str) -> dist.ProcessGroup:
    identity = layout[dist.get_rank()]
    return dist.new_group(backend="shm", pg_options=ddpx.ShmOptions(host_identity=identity))


def _values(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers, whose sum has the same bits in every order."""
    torch.manual_seed(10 * seed + dist.get_rank())
    real = torch.randint(-8, 8, (size,))
    if dtype.is_complex:
        return torch.complex(real.double(), real.flip(0).double()).to(dtype)
    return real.to(dtype)


def _check_all_reduce(layout: str) -> None:
    group = _shm(layout)
    hosts = group._get_backend(torch.device("cpu")).hosts
    assert hosts == [[r for r, x in enumerate(layout) if x == host] for host in sorted({*layout})]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for op in OPS:
            if dtype.is_complex and op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
                continue
            if op == dist.ReduceOp.AVG and dtype == torch.int64:
                continue
            for size in (1, 1001, 100_003):
                expected, actual = (_values(size, dtype, size) for _ in range(2))
                average = op == dist.ReduceOp.AVG
                dist.all_reduce(expected, dist.ReduceOp.SUM if average else op)
                if average:
                    reals = torch.view_as_real(expected) if dtype.is_complex else expected
                    reals.div_(len(layout))
                dist.all_reduce(actual, op, group=group)
                assert torch.equal(actual, expected), (dtype, op, size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduce(ranks, layout):
    ranks(len(layout)).run(_check_all_reduce, layout)


def _check_in_flight(layout: str) -> None:
    tensors = [_values(size, torch.float32, size) for size in (5, 70_000, 1, 3000, 200_000)]
    expected = [tensor.clone() for tensor in tensors]
    works = [dist.all_reduce(tensor, group=_shm(layout), async_op=True) for tensor in tensors]
    for tensor in expected:
        dist.all_reduce(tensor)
    for work in reversed(works):
        work.wait()
    for actual, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(actual, wanted)


def _check_others(layout: str) -> None:
    group, size = _shm(layout), len(layout)
    mine = _values(1000, torch.float32, 1)
    gathered = [torch.empty(1000) for _ in range(size)]
    dist.all_gather(gathered, mine, group=group)
    assert torch.equal(gathered[dist.get_rank()], mine)
    shared = mine.clone()
    dist.broadcast(shared, size - 1, group=group)
    assert torch.equal(shared, gathered[-1])
    part = torch.empty(1000)
    dist.reduce_scatter(part, gathered, group=group)
    assert torch.equal(part, size * mine)
    dist.barrier(group=group)


def _check_reducer(layout: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5)).double()
    grads = []
    for group in (dist.group.WORLD, _shm(layout)):
        model = ddpx.ReducerDDP(copy.deepcopy(module), process_group=group, bucket_cap_mb=0.002)
        torch.manual_seed(dist.get_rank())
        model(torch.randn(7, 20).double()).square().sum().backward()
        grads.append([param.grad.clone() for param in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)
    for grad in grads[1]:
        reference = grad.clone()
        dist.broadcast(reference, 0)
        assert torch.equal(grad, reference)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("check", [_check_in_flight, _check_others, _check_reducer])
def test_over_hosts(ranks, layout, check):
    ranks(len(layout)).run(check, layout)


def _die_on_a_host(victim: int) -> Any:
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == victim:
        time.sleep(0.5)
        die()
    return error_of(lambda: [dist.all_reduce(torch.ones(1000)) for _ in range(3)])


# A rank that is not a leader; leaders with and without other ranks on their host; rank 0.
@pytest.mark.parametrize("layout, victim", [("aabb", 3), ("aabb", 2), ("aaab", 3), ("abc", 0)])
def test_every_host_hears_who_died(layout, victim):
    outcomes = run_mortal(len(layout), _die_on_a_host, victim, identities=layout)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            text, seconds = outcome.value
            assert f"rank {victim} " in text, (rank, text)
            assert seconds < 5.0, (rank, seconds, text)


def _abort_on_a_host(victim: int) -> Any:
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == victim:
        time.sleep(0.5)
        dist.distributed_c10d._get_default_group().abort()
    return error_of(lambda: dist.all_reduce(torch.ones(1000)))


@pytest.mark.parametrize("layout, victim", [("aab", 0), ("aab", 1), ("abb", 2)])
def test_every_host_hears_of_an_abort(layout, victim):
    for rank, outcome in enumerate(run_mortal(3, _abort_on_a_host, victim, identities=layout)):
        text, seconds = outcome.value
        assert f"rank {victim} aborted the group" in text, (rank, text)
        assert seconds < 5.0, (rank, seconds, text)


def _stall_on_a_host() -> Any:
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 3:
        time.sleep(11.0)
        return "stalled"
    return error_of(lambda: dist.all_reduce(torch.ones(1000)))


def test_every_host_hears_who_stalls():
    outcomes = run_mortal(4, _stall_on_a_host, identities="aabb", timeout_s=4.0)
    for rank in range(3):
        text, seconds = outcomes[rank].value
        assert "rank 3 did not arrive" in text, (rank, text)
        assert seconds < 10.0


def _destroy_with_work_in_flight() -> tuple[str, float]:
    """The other host never joins. Destroying the group must not wait for it."""
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 1:
        time.sleep(3.0)
        return "", 0.0
    dist.all_reduce(torch.ones(10), async_op=True)
    return error_of(dist.destroy_process_group)


def test_destroying_does_not_wait_for_other_hosts():
    outcomes = run_mortal(3, _destroy_with_work_in_flight, identities="aab")
    assert all(outcome.value[1] < 10.0 for outcome in outcomes)


_STORE = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def _destroy_while_the_store_is_silent(port: int, store_process: int) -> Any:
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("shm", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    if rank == 0:
        os.kill(store_process, signal.SIGSTOP)
    time.sleep(1.0)  # a thread of each rank now waits for an answer of the store
    return error_of(dist.destroy_process_group)


def test_destruction_does_not_wait_for_a_silent_store():
    command = [sys.executable, "-c", _STORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as own:
        try:
            assert own.stdout is not None
            port = int(own.stdout.readline())
            outcomes = run_mortal(
                2, _destroy_while_the_store_is_silent, port, own.pid, identities="ab"
            )
        finally:
            own.kill()
    for outcome in outcomes:
        text, seconds = outcome.value
        assert text == ""
        assert seconds < 10.0
