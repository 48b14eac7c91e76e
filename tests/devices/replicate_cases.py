"""Trainings of a module without a wrapper on a device. They run on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from device_models import backward, batch, layers, loss_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision
from usage_cases import State, state_of, train

import ddpx


def plain(device: str, **options: Any) -> State:
    return train(ddpx.replicate(layers(device), **options), device)


def inputs_of_the_cpu(device: str, **options: Any) -> State:
    """Forwards move inputs to the device."""
    module = layers(device)
    ids = None if device == "cpu" else [next(module.parameters()).device]
    model = ddpx.replicate(module, device_ids=ids, **options)
    for step in range(4):
        backward(loss_of(model, batch("cpu", step)))
    return [param.grad.detach().cpu() for param in model.parameters() if param.grad is not None]


def accumulated(device: str, **options: Any) -> State:
    model = ddpx.replicate(layers(device), **options)
    with ddpx.no_sync(model):
        backward(loss_of(model, batch(device, 10)))
    return train(model, device)


def with_a_hook(device: str, **options: Any) -> State:
    model = ddpx.replicate(layers(device), bucket_cap_mb=0.0015, **options)
    ddpx.register_comm_hook(model, dist.group.WORLD, default_hooks.fp16_compress_hook)
    return train(model, device)


def uneven_inputs(device: str, **options: Any) -> State:
    model = ddpx.replicate(layers(device), **options)
    with ddpx.join(model):
        train(model, device, 3 + dist.get_rank())
    return state_of(model)


def in_mixed_precision(device: str, **options: Any) -> State:
    precision = _MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    return train(ddpx.replicate(layers(device), mixed_precision=precision, **options), device)


def beside_a_copy(device: str, **options: Any) -> State:
    """A copy trains alone, and does not disturb the module."""
    model = ddpx.replicate(layers(device), **options)
    train(copy.deepcopy(model), device, 1 + dist.get_rank())
    return train(model, device)


CASES = (
    plain,
    inputs_of_the_cpu,
    accumulated,
    with_a_hook,
    uneven_inputs,
    in_mixed_precision,
    beside_a_copy,
)
