"""Derived classes override the parts of DDP's forward, and scripts call these parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, WRAPPERS, Normed, Wrapper, assert_same_on_all_ranks
from test_ddp_names import CALLED
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _BufferCommHookLocation


def _hook(state: Any, buffers: dict[str, torch.Tensor]) -> None:
    state._default_broadcast_coalesced(list(buffers.values()))


def _derived(cls: Any, log: list[str]) -> Any:
    """A class that records each call of a method that forward, construction or a copy makes."""

    def noting(name: str) -> Any:
        if name in ("_distributed_rank", "join_device", "join_process_group"):

            def get(self: Any) -> Any:
                log.append(name)
                return getattr(super(derived, self), name)

            return property(get)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return getattr(super(derived, self), name)(*args, **kwargs)

        return method

    derived = type("Derived", (cls,), {name: noting(name) for name in CALLED})
    return derived


def _use_everything(cls: Any) -> tuple[list[torch.Tensor], set[str]]:
    """Trains in all the ways that reach methods of ``CALLED``."""
    log: list[str] = []
    derived = _derived(cls, log)
    torch.manual_seed(0)
    model = derived(Normed(), static_graph=True, **SMALL_CAP)
    model.register_comm_hook(None, allreduce_hook)
    for number in range(3):
        torch.manual_seed(10 * number + dist.get_rank())
        model.zero_grad()
        model(torch.randn(6, 16)).square().mean().backward()
    hooked = derived(Normed(), **SMALL_CAP)
    hooked._register_buffer_comm_hook(hooked, _hook, _BufferCommHookLocation.POST_FORWARD)
    for _ in range(2):
        hooked(torch.ones(6, 16)).sum().backward()
    plain = derived(Normed(), **SMALL_CAP)
    with plain.join():
        for _ in range(1 + dist.get_rank()):
            plain(torch.ones(6, 16)).sum().backward()
    copy.deepcopy(plain)
    tensors = [p.grad for p in model.parameters()] + list(model.buffers())
    logs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, log)  # only a rank without inputs shadows the others
    return tensors, {name for each in logs for name in each}


def _check_overrides_run() -> None:
    (theirs, called_there), (ours, called_here) = map(_use_everything, WRAPPERS)
    assert all(map(torch.equal, ours, theirs))
    assert called_there == CALLED, CALLED - called_there
    assert called_here == CALLED, CALLED - called_here


@pytest.mark.wrapper_only
def test_overrides_run(ranks):
    ranks(2).run(_check_overrides_run, timeout=60.0)


def _of_forward(cls: Any, name: str) -> Any:
    """A derived class with an override that changes what a forward computes."""

    class Derived(cls):  # type: ignore[misc]
        pass

    def _run_ddp_forward(self: Any, *inputs: Any) -> Any:
        return 2 * self.module.mlp(*inputs)

    def _pre_forward(self: Any, x: torch.Tensor) -> Any:
        return super(Derived, self)._pre_forward(2 * x)

    def _post_forward(self: Any, output: torch.Tensor) -> Any:
        return 3 * super(Derived, self)._post_forward(output)

    def _sync_buffers(self: Any) -> None:
        with torch.no_grad():
            for buffer in self.module.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= dist.get_world_size()

    def _sync_module_buffers(self: Any, authoritative_rank: int) -> None:
        super(Derived, self)._sync_module_buffers(1 % dist.get_world_size())
        self.modules_buffers[0].add_(1)

    def _check_sync_bufs_pre_fwd(self: Any) -> bool:
        return False

    def _check_sync_bufs_post_fwd(self: Any) -> bool:
        return True

    def _assign_modules_buffers(self: Any) -> None:
        super(Derived, self)._assign_modules_buffers()
        self.modules_buffers = self.modules_buffers[1:]

    @contextmanager
    def _inside_ddp_forward(self: Any) -> Iterator[None]:
        with super(Derived, self)._inside_ddp_forward(), torch.autocast("cpu", torch.bfloat16):
            yield

    def _build_params_for_reducer(self: Any) -> Any:
        params, sparse = super(Derived, self)._build_params_for_reducer()
        return params[::-1], sparse[::-1]

    def will_sync_module_buffers(self: Any) -> bool:
        return True

    setattr(Derived, name, locals()[name])
    return Derived


OVERRIDES = [
    "_run_ddp_forward",
    "_pre_forward",
    "_post_forward",
    "_sync_buffers",
    "_sync_module_buffers",
    "_check_sync_bufs_pre_fwd",
    "_check_sync_bufs_post_fwd",
    "_assign_modules_buffers",
    "_inside_ddp_forward",
    "_build_params_for_reducer",
    "will_sync_module_buffers",
]


def _trained(make: Callable[..., Wrapper]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = make(Normed(), find_unused_parameters=True, **SMALL_CAP)
    tensors = []
    for number in range(4):
        torch.manual_seed(10 * number + dist.get_rank())
        model.zero_grad()
        with torch.no_grad():
            model(torch.randn(6, 16))
        model(torch.randn(6, 16)).float().square().mean().backward()
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        tensors += [buffer.clone() for buffer in model.buffers()]
    return tensors


def _check_override(name: str, on_instance: bool) -> None:
    def make(cls: Any, module: nn.Module, **options: Any) -> Wrapper:
        derived = _of_forward(cls, name)
        if not on_instance:
            return derived(module, **options)
        model = derived.__mro__[1](module, **options)
        model.__class__ = derived  # as a script that replaces a method later
        return model

    theirs, ours = (
        _trained(lambda module, cls=cls, **options: make(cls, module, **options))
        for cls in WRAPPERS
    )
    assert len(theirs) == len(ours) > 0
    assert all(map(torch.equal, theirs, ours))


@pytest.mark.wrapper_only
@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("world", [1, 2])
def test_override_in_a_forward(ranks, name, world):
    ranks(world).run(_check_override, name, False)


@pytest.mark.wrapper_only
@pytest.mark.parametrize("name", ["_run_ddp_forward", "_sync_buffers"])
def test_override_after_construction(ranks, name):
    ranks(2).run(_check_override, name, True)


def _train_step(model: Wrapper, x: torch.Tensor) -> torch.Tensor:
    """A training step outside forward, as trainers write it for DDP."""
    model.reducer._rebuild_buckets()
    if model._check_sync_bufs_pre_fwd():
        model._sync_buffers()
    output = model.module(x)
    if model._check_sync_bufs_post_fwd():
        model._sync_buffers()
    if torch.is_grad_enabled() and model.require_backward_grad_sync:
        model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
    else:
        model.require_forward_param_sync = False
    return output


def _pre_forward_of_ddp(model: Wrapper, x: torch.Tensor) -> torch.Tensor:
    """The calls of DDP's own forward."""
    if torch.is_grad_enabled() and model.require_backward_grad_sync:
        model.logger.set_runtime_stats_and_log()
        model.reducer.prepare_for_forward()
    if torch.is_grad_enabled() and model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True
    if model._check_sync_bufs_pre_fwd():
        model._sync_buffers()
    with model._inside_ddp_forward():
        assert type(model)._get_active_ddp_module() is model
        output = model.module(x)
    return model._post_forward(output)


def _in_parts(model: Wrapper, x: torch.Tensor) -> torch.Tensor:
    inputs, kwargs = model._pre_forward(x)
    return model._post_forward(model._run_ddp_forward(*inputs, **kwargs))


CALLERS = {f.__name__: f for f in (_train_step, _pre_forward_of_ddp, _in_parts)}


def _check_caller(name: str) -> None:
    results = []
    for cls in WRAPPERS:
        torch.manual_seed(0)
        model = cls(Normed(), **SMALL_CAP)
        tensors = []
        for number in range(5):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            if number == 2:
                with model.no_sync():
                    CALLERS[name](model, torch.randn(6, 16))
            CALLERS[name](model, torch.randn(6, 16)).square().mean().backward()
            assert_same_on_all_ranks(*(p.grad for p in model.parameters()))
            tensors += [p.grad.clone() for p in model.parameters()]
            tensors += [buffer.clone() for buffer in model.buffers()]
        results.append(tensors)
    assert all(map(torch.equal, *results))


@pytest.mark.wrapper_only
@pytest.mark.parametrize("name", CALLERS)
def test_calls_of_the_parts(ranks, name):
    ranks(2).run(_check_caller, name)


def _check_sizes_of_broadcasts() -> None:
    for cls in WRAPPERS:
        sizes = []

        class Derived(cls):  # type: ignore[misc, valid-type]
            seen = sizes

            def _distributed_broadcast_coalesced(
                self, tensors: Any, buffer_size: int, authoritative_rank: int = 0
            ) -> None:
                self.seen.append(buffer_size)
                super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)

        model = Derived(Normed())
        sizes.clear()
        model._default_broadcast_coalesced()
        model._default_broadcast_coalesced(bucket_size=7)
        assert sizes == [model.broadcast_bucket_size, 7], cls


def test_sizes_of_broadcasts(ranks):
    ranks(2).run(_check_sizes_of_broadcasts)
