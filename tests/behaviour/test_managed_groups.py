"""Process groups that the user wrote in Python, or made without ``new_group``, as DDP uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managed_groups import IN_PLACE_OF_RANKS, ManagedGroup, WaitOnlyGroup, WrappedGroup
from slow_ddp import MODES, modes, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.comm.collectives import all_gather_json
from ddpx.testing import compare_traces, record_training

SMALL_CAP = 0.0001
groups = pytest.mark.parametrize("group", IN_PLACE_OF_RANKS)


class Net(nn.Module):
    """Has a buffer, and branches of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor, branches: tuple[int, ...]) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return sum(torch.tanh(self.branches[index](x)) for index in branches)


def _train(
    wrap: Any, make_group: Callable[[], Any], options: dict[str, Any], num_local: int = 0
) -> tuple[Any, list[list[tuple[str, torch.dtype, int]]]]:
    """The tensors of a training, and the calls of each step."""
    group = make_group()
    steps: list[list[tuple[str, torch.dtype, int]]] = []
    varies = options.get("find_unused_parameters", False)

    def step(model: nn.Module, number: int) -> None:
        group.calls.clear()
        branches = (number % 2,) if varies else (0, 1)
        for _ in range(num_local):
            with model.no_sync():
                model(torch.randn(4, 6), branches).square().mean().backward()
        model(torch.randn(4, 6), branches).square().mean().backward()
        steps.append(list(group.calls))

    trace = record_training(
        Net,
        lambda module: wrap(module, process_group=group, bucket_cap_mb=SMALL_CAP, **options),
        step,
        num_steps=5,
    )
    return trace, steps


def _compare(make_group: Callable[[], Any], options: dict[str, Any], num_local: int = 0) -> None:
    expected, calls_of_ddp = _train(DistributedDataParallel, make_group, options, num_local)
    actual, calls = _train(ReducerDDP, make_group, options, num_local)
    compare_traces(expected, actual).raise_if_different()
    for number, (theirs, ours) in enumerate(zip(calls_of_ddp, calls, strict=True)):
        if number >= 3:  # the order of buckets is settled
            assert sorted(theirs, key=str) == sorted(ours, key=str), number
        for name in ("allreduce", "broadcast"):
            assert sum(n == name for n, *_ in ours) > 0, (number, ours)


def _compare_named(group: str, mode: str, num_local: int) -> None:
    _compare(IN_PLACE_OF_RANKS[group], MODES[mode], num_local)


@modes
@groups
def test_managed_group(ranks, group, mode):
    on_ranks(ranks, 1, _compare_named, group, mode, 0)


@groups
def test_local_backwards_make_no_call(ranks, group):
    on_ranks(ranks, 1, _compare_named, group, "default", 2)


def _compare_wrapped(mode: str) -> None:
    _compare(WrappedGroup, MODES[mode])


@modes
def test_group_that_passes_calls_on(ranks, mode, world):
    on_ranks(ranks, world, _compare_wrapped, mode)


def _compare_builtin(group: str, kind: dist.BuiltinCommHookType) -> None:
    def wrap(cls: Any) -> Callable[..., nn.Module]:
        def make(module: nn.Module, **options: Any) -> nn.Module:
            model = cls(module, **options)
            model._register_builtin_comm_hook(kind)
            return model

        return make

    make_group = IN_PLACE_OF_RANKS[group]
    ddp, _ = _train(wrap(DistributedDataParallel), make_group, {})
    ours, _ = _train(wrap(ReducerDDP), make_group, {})
    compare_traces(ddp, ours).raise_if_different()


@pytest.mark.parametrize("group", ["in place", "value of a future"])
def test_builtin_hook(ranks, group):
    on_ranks(ranks, 1, _compare_builtin, group, dist.BuiltinCommHookType.ALLREDUCE)


def _sparse(group: str) -> None:
    grads = []
    for wrap in (DistributedDataParallel, ReducerDDP):
        torch.manual_seed(0)
        module = nn.Embedding(5, 3, sparse=True)
        model = wrap(module, process_group=IN_PLACE_OF_RANKS[group]())
        model(torch.tensor([1, 3])).sum().backward()
        grads.append(module.weight.grad.to_dense())
    assert torch.equal(*grads)


@groups
def test_sparse_gradient(ranks, group):
    on_ranks(ranks, 1, _sparse, group)


def _without_future() -> None:
    group = WaitOnlyGroup()
    model = ReducerDDP(nn.Linear(2, 1, bias=False), process_group=group)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.0, 1.0]]


def test_work_without_a_future(ranks):
    on_ranks(ranks, 1, _without_future)


def _check_further_calls() -> None:
    """Each call of a wrapper goes through the methods of the group."""
    group = IN_PLACE_OF_RANKS["in place, one replica"]()
    model = ReducerDDP(nn.Linear(2, 1, bias=False), process_group=group, bucket_cap_mb=1)
    assert {"allgather", "broadcast"} <= {name for name, *_ in group.calls}
    model.set_check_finite()
    group.calls.clear()
    model(torch.ones(1, 2)).sum().backward()
    assert [name for name, *_ in group.calls] == ["allreduce", "allreduce"]
    assert model.reducer.transport == "managed"
    assert model._get_ddp_logging_data()["backend_name"] == "managed"
    model = ReducerDDP(nn.Linear(2, 1), process_group=IN_PLACE_OF_RANKS["in place"]())
    assert model._get_ddp_logging_data()["world_size"] == 1  # as DDP's core reads it
    with pytest.raises(ValueError, match="transport='shm' cannot be used"):
        ReducerDDP(nn.Linear(2, 1), process_group=group, transport="shm")


def test_further_calls(ranks):
    on_ranks(ranks, 1, _check_further_calls)


def _check_autograd_grad() -> None:
    """The result of the group is in a future. The last rank does not use the bias."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = ReducerDDP(nn.Linear(2, 1), process_group=WrappedGroup())
    params = list(model.parameters())
    x = torch.full((1, 2), float(rank))
    output = model(x) if rank < world - 1 else nn.functional.linear(x, params[0])
    weight, bias = model.synchronized_grads(output.sum(), params, allow_unused=True)
    # The group halves sums, also for another number of ranks.
    assert weight.tolist() == [[(world - 1) / 4] * 2]
    assert bias.tolist() == pytest.approx([(world - 1) / world / 2])


def test_autograd_grad(ranks, world):
    on_ranks(ranks, world, _check_autograd_grad)


class _Gathering(ManagedGroup):
    """The C++ part has one rank, but ``size()`` is that of the group behind it, as in torchft."""

    def __init__(self) -> None:
        super().__init__(dist.get_world_size())
        self.num_gathered: list[int] = []

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: Any, options: Any = None) -> Any:
        self.num_gathered.append(len(outputs[0]))
        if self.num_gathered[-1] == 1:
            return super().allgather(outputs, inputs)
        return dist.group.WORLD.allgather(outputs, inputs)


def _check_number_of_ranks() -> None:
    group = _Gathering()
    found = all_gather_json(dist.get_rank(), group, torch.device("cpu"))
    assert found == list(range(dist.get_world_size()))
    group.num_gathered.clear()
    ReducerDDP(nn.Linear(2, 1), process_group=group)
    assert set(group.num_gathered) == {1}  # as DDP's core reads it


def test_the_number_of_gathered_tensors(ranks):
    on_ranks(ranks, 2, _check_number_of_ranks)


# ---- groups that torch did not make --------------------------------------------------------------


def _by_hand(name: str | None) -> dist.ProcessGroup:
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"by hand {name}", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, world)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if name is not None:
        group._set_group_name(name)
    return group


def _train_by_hand(name: str | None) -> None:
    torch.manual_seed(0)
    model = ReducerDDP(nn.Linear(2, 2), process_group=_by_hand(name))
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), float(dist.get_rank() + 1))).sum().backward()
        mean = (dist.get_world_size() + 1) / 2
        assert torch.equal(model.module.weight.grad, torch.full((2, 2), mean))
    assert "backend_name" in model._get_ddp_logging_data()


@pytest.mark.parametrize("name", [None, "mine"])
def test_group_made_by_hand(ranks, name, world):
    on_ranks(ranks, world, _train_by_hand, name)


def _destroyed() -> None:
    group = dist.new_group()
    dist.barrier()  # a peer may still connect to this rank
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="was destroyed"):
        ReducerDDP(nn.Linear(2, 2), process_group=group)


def test_destroyed_group(ranks, world):
    on_ranks(ranks, world, _destroyed)
