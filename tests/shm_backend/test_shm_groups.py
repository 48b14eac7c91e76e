"""Groups of the ``shm`` backend: creation, use of several groups, destruction, invalid creation."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpx
from ddpx import _C
from ddpx.testing import RankPool

CPU = torch.device("cpu")


def _sum_of_ranks(group: dist.ProcessGroup | None = None, size: int = 1000) -> float:
    tensor = torch.full((size,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_init_process_group(world_size):
    """Creates groups, also with many more ranks than cores."""
    with RankPool(world_size, "shm") as pool:
        expected = world_size * (world_size + 1) / 2
        for size in (1, 100_000):
            assert pool.run(_sum_of_ranks, None, size) == [expected] * world_size


def _check_subsets() -> None:
    for members in ([0, 1], [1, 2], [2], [2, 0], [0, 1, 2]):
        group = dist.new_group(members, backend="shm")
        if dist.get_rank() in members:
            assert _sum_of_ranks(group) == sum(rank + 1 for rank in members)
            source = torch.full((5,), float(dist.get_rank()))
            dist.broadcast(source, members[-1], group=group)
            assert (source == members[-1]).all()


def test_groups_of_some_ranks(ranks):
    ranks(3).run(_check_subsets)


def _check_backend_string() -> None:
    group = dist.new_group(backend="cpu:shm,cuda:gloo")
    assert isinstance(group._get_backend(CPU), ddpx._C.ShmBackend)
    assert _sum_of_ranks(group) == 3


def test_backend_string(ranks):
    ranks(2).run(_check_backend_string)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _check_waiting_at_once() -> None:
    group = dist.new_group(backend="shm")
    before = _num_threads()
    assert _sum_of_ranks(group, 10) == _sum_of_ranks(group, 100_000) == 3
    dist.barrier(group=group)
    assert _num_threads() == before
    tensors = [torch.full((100_000,), float(dist.get_rank() + i)) for i in range(4)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[:3]]
    dist.all_reduce(tensors[3], group=group)
    assert all(work.is_completed() for work in works), "earlier operations come first"
    assert [tensor[-1].item() for tensor in tensors] == [1, 3, 5, 7]
    assert _num_threads() == before + 1


def test_operations_that_are_waited_for_at_once_need_no_thread(ranks):
    ranks(2).run(_check_waiting_at_once)


def _num_gloo_threads() -> int:
    tasks = Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text().strip() == "pt_gloo_runloop" for task in tasks)


def _check_sparse_beside_others() -> None:
    before = _num_gloo_threads()
    group = dist.new_group(backend="shm")
    assert _num_gloo_threads() == before + 1
    tensors = [torch.eye(3).to_sparse() for _ in range(3)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert torch.equal(tensor.to_dense(), 2 * torch.eye(3))


def test_gloo_has_one_thread(ranks):
    """With two threads, torch's gloo corrupts memory: see docs/divergences.md, sparse gradients
    over gloo."""
    ranks(2).run(_check_sparse_beside_others)


def _check_several_at_a_time() -> None:
    groups = [dist.new_group(backend="shm") for _ in range(3)]
    tensors = [torch.full((50_000,), float(i)) for i in range(6)]
    works = [
        dist.all_reduce(tensor, group=groups[i % 3], async_op=True)
        for i, tensor in enumerate(tensors)
    ]
    for work in reversed(works):
        work.wait()
    assert [tensor[-1].item() for tensor in tensors] == [2.0 * i for i in range(6)]


def test_several_groups_at_a_time(ranks):
    ranks(2).run(_check_several_at_a_time)


def _used() -> dict[str, int]:
    with open("/proc/self/statm") as statm:
        shared = int(statm.read().split()[2])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared pages": shared,
    }


def _check_leaks() -> None:
    def once() -> None:
        group = dist.new_group(backend="shm")
        tensor = group._get_backend(CPU).allocate_tensor(500_000, dtype=torch.float32, device=CPU)
        dist.all_reduce(tensor.fill_(1), group=group)
        dist.destroy_process_group(group)

    for _ in range(3):
        once()
    gc.collect()
    before = _used()
    for _ in range(20):
        once()
    gc.collect()
    after = _used()
    assert after["descriptors"] <= before["descriptors"] + 2, (before, after)
    assert after["threads"] <= before["threads"] + 1, (before, after)
    # The home segments of one group have 900 pages.
    assert after["shared pages"] <= before["shared pages"] + 1000, (before, after)


def test_destroyed_groups_leave_nothing(ranks):
    ranks(2).run(_check_leaks)


def _check_use_after_destroy() -> None:
    group = dist.new_group(backend="shm")
    backend = group._get_backend(CPU)
    tensor = backend.allocate_tensor(1000, dtype=torch.float32, device=CPU).fill_(1)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    dist.destroy_process_group(group)
    work.wait()
    assert tensor.sum() == 2000  # the memory is still valid
    for call in (backend.allreduce, backend.reduce):
        with pytest.raises(RuntimeError, match="the process group was destroyed"):
            call([tensor]) if call == backend.allreduce else call([tensor], dist.ReduceOptions())


def test_use_after_destroy(ranks):
    ranks(2).run(_check_use_after_destroy)


def _check_errors() -> None:
    with pytest.raises(TypeError, match=r"takes a ddpx\.ShmOptions as pg_options, but got int"):
        dist.new_group(backend="shm", pg_options=3)
    with pytest.raises(ValueError, match="no order 'ring'"):
        dist.new_group(backend="shm", pg_options=ddpx.ShmOptions(order="ring"))
    for timeout in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="timeout of an shm group must be at least 1 ms"):
            dist.new_group(backend="shm", timeout=timeout)
    backend = dist.new_group(backend="shm")._get_backend(CPU)
    before = backend.timeout
    with pytest.raises(RuntimeError, match="must be at least 1 ms, but is 0 ms"):
        backend.set_timeout(timedelta(0))
    assert backend.timeout == before


def test_wrong_options(ranks):
    ranks(2).run(_check_errors)


def _orders_differ(number: int) -> bool:
    """Whether the sum of an element depends on the buffer that contains it."""
    torch.manual_seed(dist.get_rank() + number)
    values = torch.randn(30_000)
    whole, part = values.clone(), values[20_000:].clone()
    group = dist.new_group(backend="shm")
    for tensor in (whole, part):
        dist.all_reduce(tensor, group=group)
    return not torch.equal(whole[20_000:], part)


def _orders_differ_by_variable() -> tuple[bool, bool]:
    by_default = _orders_differ(0)
    os.environ["DDPX_SHM_ORDER"] = "fixed"
    try:
        return by_default, _orders_differ(0)
    finally:
        del os.environ["DDPX_SHM_ORDER"]


def test_order_by_environment(ranks):
    assert ranks(4).run(_orders_differ_by_variable) == [(True, False)] * 4


def _new_group_with_another_order(by_variable: bool) -> str:
    order = "fixed" if dist.get_rank() else "gloo"
    options = None if by_variable else ddpx.ShmOptions(order=order)
    if by_variable:
        os.environ["DDPX_SHM_ORDER"] = order
    try:
        with pytest.raises(RuntimeError) as error:
            dist.new_group(backend="shm", pg_options=options)
    finally:
        os.environ.pop("DDPX_SHM_ORDER", None)
    return str(error.value)


@pytest.mark.parametrize("by_variable", [True, False])
def test_different_orders_are_an_error_of_the_new_group(ranks, by_variable):
    texts = ranks(2).run(_new_group_with_another_order, by_variable)
    assert len(set(texts)) == 1
    assert "'gloo' on 1 rank (rank 0); 'fixed' on 1 rank (rank 1). Set DDPX_SHM" in texts[0]


def _check_strides_differ_by_rank() -> None:
    """All ranks take the same way, whatever the strides of their tensors."""
    group = dist.new_group(backend="shm")
    rank = dist.get_rank()
    values = torch.arange(24.0).view(4, 6)
    transposed = values.clone() if rank else values.t().contiguous().t()
    twin = transposed.clone()
    dist.all_reduce(transposed, group=group)
    dist.all_reduce(twin)  # reduced in memory order, as in gloo
    assert torch.equal(transposed, twin)

    with_gaps = torch.zeros(4, 12)
    tensor = with_gaps[:, ::2] if rank else torch.zeros(4, 6)
    dist.all_reduce(tensor.copy_(values), group=group)
    assert torch.equal(tensor, 2 * values)
    assert not with_gaps[:, 1::2].any()

    outputs = list(torch.zeros(4, 2, 6).unbind(1)) if rank else list(torch.zeros(2, 4, 6))
    dist.all_gather(outputs, values + rank, group=group)
    assert all(torch.equal(output, values + i) for i, output in enumerate(outputs))


def test_strides_may_differ_by_rank(ranks):
    ranks(2).run(_check_strides_differ_by_rank)


def _check_futures() -> None:
    """Callbacks may call collectives and wait for them, as those of PowerSGD do."""
    group = dist.new_group(backend="shm")

    def again(future: torch.futures.Future[Any]) -> torch.Tensor:
        tensor = future.value()[0] + 1
        dist.all_reduce(tensor, group=group)
        return tensor

    futures = []
    for size in (10, 100_000, 10):
        tensor = torch.ones(size)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        # Ranks must agree on the order of calls, so only one chain runs at a time.
        futures.append(work.get_future().then(again).then(lambda f: f.value() + 1))
        assert (futures[-1].wait() == 7).all()
    done = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    done.wait()
    assert (done.get_future().wait()[0] == 2).all()


def test_futures(ranks):
    ranks(2).run(_check_futures)


def _profiled_names() -> set[str]:
    group = dist.new_group(backend="shm")
    with torch.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(10), group=group)
        dist.barrier(group=group)
    return {event.name for event in profiler.events()}


def test_profiler(ranks):
    for names in ranks(2).run(_profiled_names):
        assert {"shm:all_reduce", "shm:barrier"} <= names


# ---- calls that gloo refuses ---------------------------------------------------------------------

REFUSED: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "bits of floats": lambda group: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND, group),
    "dtype": lambda group: dist.reduce(torch.ones(3, dtype=torch.int16), 0, group=group),
    "sparse sizes": lambda group: dist.all_reduce(
        torch.eye(dist.get_rank() + 2).to_sparse(), group=group
    ),
}


def _check_refused_call(case: str) -> None:
    gloo, shm = (dist.new_group(backend=backend) for backend in ("gloo", "shm"))
    texts = []
    for group in (gloo, shm):
        with pytest.raises(RuntimeError) as caught:
            REFUSED[case](group)
        texts.append(str(caught.value))
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        assert values.eq(dist.get_world_size()).all()
    assert texts[1] == texts[0]


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_gloo_refuses_leaves_the_group(ranks, case):
    """No rank is blamed, and the group works on, as with gloo."""
    ranks(2).run(_check_refused_call, case)


def test_an_order_in_the_script_takes_precedence(monkeypatch):
    monkeypatch.setenv("DDPX_SHM_ORDER", "gloo")
    assert ddpx.ShmOptions(order="fixed").chosen_order() is _C.ShmOrder.FIXED
    monkeypatch.setenv("DDPX_SHM_ORDER", "fixed")
    assert ddpx.ShmOptions(order="gloo").chosen_order() is _C.ShmOrder.GLOO
    assert ddpx.ShmOptions().chosen_order() is _C.ShmOrder.FIXED
