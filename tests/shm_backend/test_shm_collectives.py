"""The ``shm`` backend compared with gloo: every collective, dtype and reduction, bit for bit."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpx

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
# Sizes around the limits between algorithms and chunks, and odd sizes.
SIZES = [0, 1, 3, 1000, 16_383, 16_384, 16_385, 262_147, 1_048_577]


@functools.cache
def _shm(order: str = "gloo") -> dist.ProcessGroup:
    return dist.new_group(backend="shm", pg_options=ddpx.ShmOptions(order=order))


def _backend(group: dist.ProcessGroup) -> ddpx._C.ShmBackend:
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, ddpx._C.ShmBackend)
    return backend


def _values(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values that differ between ranks. Integers are small, so that no product overflows."""
    torch.manual_seed(100 * seed + dist.get_rank())
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, dtype=dtype if dtype.is_complex else torch.float64).to(dtype)
    return torch.randint(0, 4, (numel,)).to(dtype)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _resident(values: torch.Tensor) -> torch.Tensor:
    """A copy in memory that peers can map."""
    cpu = torch.device("cpu")
    tensor = _backend(_shm()).allocate_tensor(values.numel(), dtype=values.dtype, device=cpu)
    return tensor.copy_(values)


def _check_all_reduce(dtype: torch.dtype, ops: list[str]) -> None:
    for size in SIZES:
        for op in ops:
            expected = _values(size, dtype)
            dist.all_reduce(expected, OPS[op])
            actual = _values(size, dtype)
            dist.all_reduce(actual, OPS[op], group=_shm())
            assert _same_bits(actual, expected), (size, op)


def _cases() -> Iterator[tuple[torch.dtype, list[str]]]:
    arithmetic = ["sum", "product", "min", "max"]
    for dtype in FLOATING:
        yield dtype, arithmetic
    for dtype in INTEGERS:
        yield dtype, [*arithmetic, "band", "bor", "bxor"]
    for dtype in COMPLEX:
        yield dtype, ["sum"]


def _with_world_sizes() -> Iterator[Any]:
    """`make test` has one number of ranks for each dtype, in turn."""
    for place, (dtype, ops) in enumerate(_cases()):
        for number, world_size in enumerate((2, 3, 4)):
            marks = [] if place % 3 == number else [pytest.mark.full_only]
            name = f"{world_size}-{str(dtype).split('.')[-1]}"
            yield pytest.param(world_size, dtype, ops, id=name, marks=marks)


@pytest.mark.parametrize("world_size, dtype, ops", _with_world_sizes())
def test_all_reduce_has_gloos_bits(ranks, world_size, dtype, ops):
    ranks(world_size).run(_check_all_reduce, dtype, ops)


def _check_resident() -> None:
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            expected = _values(size, dtype)
            actual = _resident(expected)
            dist.all_reduce(expected)
            dist.all_reduce(actual, group=_shm())
            assert _same_bits(actual, expected), (size, dtype)
    # With one private buffer, no rank works in place. The bits stay the same.
    expected = _values(100_003, torch.float32)
    actual = _resident(expected) if dist.get_rank() else expected.clone()
    dist.all_reduce(expected)
    dist.all_reduce(actual, group=_shm())
    assert _same_bits(actual, expected)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_buffers_in_shared_memory_are_reduced_in_place(ranks, world_size):
    ranks(world_size).run(_check_resident)


def _check_average() -> None:
    for dtype in [*FLOATING, *COMPLEX]:
        expected = _values(4097, dtype)
        actual = expected.clone()
        dist.all_reduce(torch.view_as_real(expected) if dtype.is_complex else expected)
        dist.all_reduce(actual, dist.ReduceOp.AVG, group=_shm())
        torch.testing.assert_close(actual, expected / dist.get_world_size())


def test_average(ranks):
    ranks(3).run(_check_average)


def _check_fixed_order() -> None:
    """The bits of a sum do not depend on the buffer that contains the element."""
    values = _values(70_001, torch.float32)
    whole = values.clone()
    dist.all_reduce(whole, group=_shm("fixed"))
    for size in (1, 999, 20_000, 40_000):
        parts = list(values.clone().split(size))[:50]
        for part in parts:
            dist.all_reduce(part, group=_shm("fixed"))
        together = torch.cat(parts)
        assert _same_bits(together, whole[: together.numel()]), size
    in_rank_order = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(in_rank_order, values)
    assert _same_bits(whole, functools.reduce(torch.add, in_rank_order))


@pytest.mark.parametrize("world_size", [3, 4])
def test_fixed_order_does_not_depend_on_the_buffer(ranks, world_size):
    ranks(world_size).run(_check_fixed_order)


Collective = Callable[[dist.ProcessGroup | None], list[torch.Tensor]]


def _broadcast(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensors = [_values(n, torch.float32) for n in (1, 5000, 300_000)]
    for tensor in tensors:
        dist.broadcast(tensor, src=dist.get_world_size() - 1, group=group)
    return tensors


def _all_gather(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    gathered = []
    for size in (1, 5000, 300_000):
        outputs = [torch.empty(size) for _ in range(dist.get_world_size())]
        dist.all_gather(outputs, _values(size, torch.float32), group=group)
        gathered += outputs
    return gathered


def _all_gather_into_tensor(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    output = torch.empty(5000 * dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(output, _values(5000, torch.int64), group=group)
    return [output]


def _reduce_scatter(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    inputs = [_values(3000, torch.float32, seed) for seed in range(dist.get_world_size())]
    output = torch.empty(3000)
    dist.reduce_scatter(output, inputs, group=group)
    return [output]


def _reduce_scatter_tensor(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    output = torch.empty(3000)
    dist.reduce_scatter_tensor(
        output, _values(3000 * dist.get_world_size(), torch.float32), group=group
    )
    return [output]


def _reduce(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensor = _values(3000, torch.float32)
    dist.reduce(tensor, dst=0, group=group)
    return [tensor] if dist.get_rank() == 0 else []


def _gather_and_scatter(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    at_root = dist.get_rank() == 0
    mine = _values(100, torch.float32)
    gathered = [torch.empty(100) for _ in range(dist.get_world_size())] if at_root else None
    dist.gather(mine, gathered, dst=0, group=group)
    scattered = torch.empty(100)
    dist.scatter(scattered, gathered, src=0, group=group)
    return [scattered]


def _send_and_recv(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(100)
    operations = [
        dist.P2POp(dist.isend, _values(100, torch.float32), (rank + 1) % size, group),
        dist.P2POp(dist.irecv, received, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [received]


def _coalesced(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensors = [_values(n, torch.float32) for n in (10, 1000)]
    with dist._coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors


def _objects(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    objects: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank()}, group=group)
    assert objects == [{"rank": rank} for rank in range(dist.get_world_size())]
    return []


def _sparse(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensor = torch.sparse_coo_tensor([[dist.get_rank(), 4]], [1.0, 2.0], (6,))
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def _strided(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensor = _values(600, torch.float32).view(20, 30).t().contiguous().t()
    dist.all_reduce(tensor, group=group)
    return [tensor]


def _several_in_flight(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensors = [_values(n, torch.float32, n) for n in (7, 50_000, 3, 200_000, 11)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


COLLECTIVES: dict[str, Collective] = {
    collective.__name__.strip("_"): collective
    for collective in (
        _broadcast,
        _all_gather,
        _all_gather_into_tensor,
        _reduce_scatter,
        _reduce_scatter_tensor,
        _reduce,
        _gather_and_scatter,
        _send_and_recv,
        _coalesced,
        _objects,
        _sparse,
        _strided,
        _several_in_flight,
    )
}


def _check_collective(name: str) -> None:
    expected = COLLECTIVES[name](None)
    actual = COLLECTIVES[name](_shm())
    assert len(actual) == len(expected)
    for index, (ours, gloos) in enumerate(zip(actual, expected, strict=True)):
        assert _same_bits(ours, gloos), index
    dist.barrier(group=_shm())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_gives_what_gloo_gives(ranks, world_size, name):
    ranks(world_size).run(_check_collective, name)


# ---- inference mode ------------------------------------------------------------------------------


@torch.inference_mode()
def _check_inference() -> None:
    """The group's thread writes results into tensors that only inference mode may change."""
    values = _values(6, torch.float32)
    for async_op in (False, True):
        with_gaps = torch.zeros(2, 6, 2)
        outputs = [with_gaps[i, :, 0] for i in range(2)]
        work = dist.all_gather(outputs, values, group=_shm(), async_op=async_op)
        tensor = with_gaps.clone()[0, :, 1].copy_(values)
        other = dist.all_reduce(tensor, group=_shm(), async_op=async_op)
        if async_op:
            time.sleep(0.2)  # the group's thread runs the operations
            work.wait()
            other.wait()
        assert torch.equal(outputs[dist.get_rank()], values)
        assert torch.equal(tensor, outputs[0] + outputs[1])


def test_tensors_of_inference_mode(ranks):
    ranks(2).run(_check_inference)
