"""Ranks on several hosts, by injected identities: results equal gloo's, failures are reported."""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mortal_ranks import die, error_of, run_mortal
from torch import nn

import ddpx

LAYOUTS = ["aabb", "aaab", "abc", "abab", "aaabb"]  # a letter per rank names its host
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
            for size in (0, 1, 1001, 300_007):  # the last size has several chunks
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
    """All-reduces in flight, beside other collectives."""
    group = _shm(layout)
    tensors = [_values(size, torch.float32, size) for size in (5, 70_000, 1, 3000, 1_000_000)]
    expected = [tensor.clone() for tensor in tensors]
    works = []
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
        dist.broadcast(torch.ones(10), 0, group=group)
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


def _check_report(text: str, rank: int, layout: str, culprit: int, local: str) -> None:
    """Ranks of the culprit's host name it. Other ranks name ranks of that host."""
    if layout[rank] == layout[culprit]:
        assert local in text, (rank, text)
        return
    beside = [str(other) for other, host in enumerate(layout) if host == layout[culprit]]
    assert "[ddpx shm rank" in text and "gloo said: " in text, (rank, text)
    named = text.partition("the exchange with rank")[2].partition(" on other hosts")[0]
    assert any(other in named for other in beside), (rank, text)


# A rank with a lane, next to others and alone; a rank without a lane; rank 0.
@pytest.mark.parametrize(
    "layout, victim", [("aabb", 3), ("aabb", 2), ("aaab", 3), ("aaab", 2), ("abc", 0)]
)
def test_every_host_reports_a_death(layout, victim):
    outcomes = run_mortal(len(layout), _die_on_a_host, victim, identities=layout)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            text, seconds = outcome.value
            _check_report(text, rank, layout, victim, f"rank {victim} ")
            assert seconds < 5.0, (rank, seconds, text)


def _abort_on_a_host(victim: int) -> Any:
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == victim:
        time.sleep(0.5)
        dist.distributed_c10d._get_default_group().abort()
    return error_of(lambda: dist.all_reduce(torch.ones(1000)))


@pytest.mark.parametrize("layout, victim", [("aab", 0), ("aab", 1), ("abb", 2)])
def test_an_abort_ends_waits_on_every_host(layout, victim):
    for rank, outcome in enumerate(run_mortal(3, _abort_on_a_host, victim, identities=layout)):
        text, seconds = outcome.value
        _check_report(text, rank, layout, victim, f"rank {victim} aborted the group")
        assert seconds < 5.0, (rank, seconds, text)


def _stall_on_a_host() -> Any:
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 3:
        return "stalled"  # the rank stays alive
    return error_of(lambda: dist.all_reduce(torch.ones(1000)))


def test_the_host_of_a_late_rank_names_it():
    outcomes = run_mortal(4, _stall_on_a_host, identities="aabb", timeout_s=4.0, stay=True)
    for rank in range(3):
        text, seconds = outcomes[rank].value
        _check_report(text, rank, "aabb", 3, "rank 3 did not arrive")
        assert seconds < 10.0


def _check_stages_overlap() -> None:
    """The last rank, alone on its host, comes late. The others go on without it."""
    group, store = _shm("aab"), dist.distributed_c10d._get_default_store()
    buckets = [torch.ones(1000) for _ in range(3)]
    if dist.get_rank() == 2:
        store.wait(["reduced"])
    works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
    if dist.get_rank() == 0:
        deadline = time.monotonic() + 20
        while buckets[-1][0] != 2:  # the sum of this host
            assert time.monotonic() < deadline, "the first bucket blocks the last bucket"
            time.sleep(0.01)
        store.set("reduced", "")
    for work in works:
        work.wait()
    assert all(torch.equal(bucket, torch.full_like(bucket, 3)) for bucket in buckets)


def test_buckets_are_reduced_within_hosts_while_others_are_between_hosts(ranks):
    ranks(3).run(_check_stages_overlap)


def _destroy_with_work_in_flight() -> tuple[str, float]:
    """The other host never joins. Destroying the group must not wait for it."""
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 1:
        return "", 0.0  # the rank stays alive
    dist.all_reduce(torch.ones(10), async_op=True)
    return error_of(dist.destroy_process_group)


def test_destroying_does_not_wait_for_other_hosts():
    outcomes = run_mortal(3, _destroy_with_work_in_flight, identities="aab", stay=True)
    assert all(outcome.value[1] < 10.0 for outcome in outcomes)
