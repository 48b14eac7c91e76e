"""The contenders of a step: the bare module, DDP at its settings, ReducerDDP over gloo and shm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from models import Build
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

Wrap = Callable[[nn.Module], nn.Module]

VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}
BATCHED: dict[str, Any] = {"batched_grad_copy": True}
LAZY: dict[str, Any] = {"lazy_bucket_allocation": True}
# DDP has the argument since torch 2.15.
DDP_CAN_BE_LAZY = LAZY.keys() <= inspect.signature(DistributedDataParallel).parameters.keys()

DDP_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": VIEWS,
    "views, batched copy": {**VIEWS, **BATCHED},
    "views, 5 MiB": {**VIEWS, "bucket_cap_mb": 5},
    "views, 100 MiB": {**VIEWS, "bucket_cap_mb": 100},
}

# Settings of DDP over shm.
DDP_OVER_SHM_SETTINGS: dict[str, dict[str, Any]] = {
    "views": VIEWS,
    "views, batched copy": {**VIEWS, **BATCHED},
}

# Settings of ReducerDDP. Each is compared with the best setting of DDP.
OUR_SETTINGS: dict[str, dict[str, Any]] = {"default": {}, "views": VIEWS}


@functools.cache
def shm_group() -> dist.ProcessGroup:
    """The shm group of this process, beside its default group, which uses gloo."""
    group = dist.new_group(backend="shm")
    assert isinstance(group, dist.ProcessGroup)
    return group


def bare() -> Wrap:
    return lambda module: module


def ddp(**options: Any) -> Wrap:
    return functools.partial(DistributedDataParallel, **options)


def ddp_over_shm(**options: Any) -> Wrap:
    """DDP over shm, which separates the gain of the transport from that of the reducer."""
    return lambda module: DistributedDataParallel(module, process_group=shm_group(), **options)


def ours_over_gloo(**options: Any) -> Wrap:
    """ReducerDDP whose buckets stay on the gloo group."""
    return functools.partial(ReducerDDP, transport="group", **options)


def ours_automatic(**options: Any) -> Wrap:
    """ReducerDDP over a gloo group, with the transport that ddpx chooses by default."""
    return functools.partial(ReducerDDP, transport="auto", **options)


def ours_with_shm(**options: Any) -> Wrap:
    """ReducerDDP over a gloo group, with shared memory also if there are several hosts."""
    return functools.partial(ReducerDDP, transport="shm", **options)


def ours_over_shm(**options: Any) -> Wrap:
    return lambda module: ReducerDDP(module, process_group=shm_group(), **options)


def with_best_settings() -> dict[str, Wrap]:
    """Few contenders, for parts that do not study the step itself."""
    return {
        "bare": bare(),
        "bare again": bare(),
        "DDP, views": ddp(**VIEWS),
        "DDP, views again": ddp(**VIEWS),
        "DDP, views, batched copy": ddp(**VIEWS, **BATCHED),
        "ddpx over gloo": ours_over_gloo(**VIEWS),
        "DDP over shm": ddp_over_shm(**VIEWS),
        "ddpx over shm": ours_over_shm(**VIEWS),
    }


def make_models(build: Build, wraps: Mapping[str, Wrap]) -> tuple[dict[str, nn.Module], Any]:
    """A model for each contender, and an input. All models share weights, which no step changes."""
    models: dict[str, nn.Module] = {}
    shared: list[torch.Tensor] = []
    for name, wrap in wraps.items():
        torch.manual_seed(0)
        module, x = build()
        params = list(module.parameters())
        shared = shared or [param.data for param in params]
        for param, data in zip(params, shared, strict=True):
            param.data = data
        models[name] = wrap(module)
    return models, x


def make_steps(build: Build, wraps: Mapping[str, Wrap]) -> dict[str, Callable[[], None]]:
    models, x = make_models(build, wraps)
    return {name: functools.partial(step, model, x) for name, model in models.items()}


def step(model: nn.Module, x: torch.Tensor) -> None:
    """A step without an optimizer, which would be the same for all contenders."""
    model.zero_grad()
    model(x).square().mean().backward()
