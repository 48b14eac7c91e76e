"""Training over ``shm`` with ReducerDDP and torch's DDP: the bits are those of gloo."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ddpx

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static-view": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}
HOOKS = ["none", "allreduce", "fp16", "powersgd"]
Wrapper = Any


@functools.cache
def _group(backend: str) -> dist.ProcessGroup:
    """A group that is kept.

    Over gloo, a hook's callback may otherwise drop the last reference on a thread of the group.
    That thread would then wait for itself and abort.
    """
    return dist.new_group(backend=backend)


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 7))


def _add_hook(model: Wrapper, hook: str, group: dist.ProcessGroup) -> None:
    if hook == "allreduce":
        model.register_comm_hook(group, default_hooks.allreduce_hook)
    elif hook == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _gradients(
    cls: Callable[..., Wrapper], backend: str, options: dict[str, Any], hook: str
) -> list[torch.Tensor]:
    """The gradients of several steps, one after another."""
    group = _group(backend)
    cap = 25 if hook == "powersgd" else 0.1
    model = cls(_module(), process_group=group, bucket_cap_mb=cap, **options)
    _add_hook(model, hook, group)
    gradients = []
    for number in range(4):
        torch.manual_seed(10 * number + dist.get_rank())
        model.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        gradients += [param.grad.clone() for param in model.parameters()]
    return gradients


def _assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected) > 0
    for index, (ours, gloos) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(ours, gloos), index


def _check_modes(mode: str, hook: str) -> None:
    ours, gloos = (
        _gradients(ddpx.ReducerDDP, backend, MODES[mode], hook) for backend in ("shm", "gloo")
    )
    _assert_same(ours, gloos)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_modes_have_gloos_bits(ranks, world_size, mode):
    ranks(world_size).run(_check_modes, mode, "none")


@pytest.mark.parametrize("hook", HOOKS[1:])
@pytest.mark.parametrize("mode", ["default", "view"])
def test_hooks_have_gloos_bits(ranks, mode, hook):
    ranks(2).run(_check_modes, mode, hook)


def _check_torch_ddp(options: dict[str, Any]) -> None:
    ours, gloos = (
        _gradients(DistributedDataParallel, backend, options, "none") for backend in ("shm", "gloo")
    )
    _assert_same(ours, gloos)


@pytest.mark.parametrize("mode", ["default", "view"])
def test_torch_ddp_works_over_shm(ranks, mode):
    ranks(2).run(_check_torch_ddp, MODES[mode])


def _check_residency(view: bool) -> None:
    group = dist.new_group(backend="shm")
    backend = group._get_backend(torch.device("cpu"))
    assert backend.resident_bytes == 0
    model = ddpx.ReducerDDP(_module(), process_group=group, gradient_as_bucket_view=view)
    num_bytes = sum(param.nbytes for param in model.parameters())
    for _ in range(3):
        model(torch.randn(4, 30)).sum().backward()
        assert backend.resident_bytes >= num_bytes
    storages = {param.grad.untyped_storage().data_ptr() for param in model.parameters()}
    assert len(storages) == (1 if view else len(list(model.parameters())))


@pytest.mark.parametrize("view", [False, True])
def test_buckets_lie_in_shared_memory(ranks, view):
    ranks(2).run(_check_residency, view)


def _check_fixed_order() -> None:
    """Gradients do not depend on bucket sizes. In gloo's order of 3 ranks they do."""
    for order, alike in (("fixed", True), ("gloo", False)):
        group = dist.new_group(backend="shm", pg_options=ddpx.ShmOptions(order=order))
        results = []
        for cap in (0.01, 25):
            model = ddpx.ReducerDDP(_module(), process_group=group, bucket_cap_mb=cap)
            for _ in range(2):  # the second step has rebuilt buckets
                torch.manual_seed(dist.get_rank())
                model.zero_grad()
                model(torch.randn(8, 30)).square().mean().backward()
            results.append([param.grad.clone() for param in model.parameters()])
        assert alike == all(map(torch.equal, *results)), order


def test_fixed_order_makes_bucket_sizes_irrelevant(ranks):
    ranks(3).run(_check_fixed_order)


def _joined_gradients(backend: str) -> list[torch.Tensor]:
    """The gradients of every step. Rank r has 2 + 2 r steps."""
    group = _group(backend)
    model = ddpx.ReducerDDP(_module(), process_group=group, bucket_cap_mb=0.1)
    gradients = []
    with model.join():
        for number in range(2 + 2 * dist.get_rank()):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            model(torch.randn(8, 30)).square().mean().backward()
            gradients += [param.grad.clone() for param in model.parameters()]
    # The last rank to join has the final parameters, and all ranks get them.
    return gradients + [param.detach().clone() for param in model.parameters()]


def _check_join() -> None:
    ours, gloos = (_joined_gradients(backend) for backend in ("shm", "gloo"))
    _assert_same(ours, gloos)


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_inputs_have_gloos_bits(ranks, world_size):
    ranks(world_size).run(_check_join)


def _check_zero() -> None:
    group = dist.new_group(backend="shm")
    module = _module()
    twin = copy.deepcopy(module)
    model = ddpx.ReducerDDP(module, process_group=group)
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
    )
    plain_model = ddpx.ReducerDDP(twin)
    plain = torch.optim.Adam(twin.parameters(), lr=0.01)
    for number in range(3):
        for wrapped, optimizer in ((model, sharded), (plain_model, plain)):
            torch.manual_seed(10 * number + dist.get_rank())
            optimizer.zero_grad()
            wrapped(torch.randn(8, 30)).square().mean().backward()
            optimizer.step()
    _assert_same([*module.parameters()], [*twin.parameters()])


def test_zero_redundancy_optimizer(ranks):
    ranks(2).run(_check_zero)
