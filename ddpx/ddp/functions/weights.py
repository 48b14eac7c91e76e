"""The weight of a forward, for ``average="weights"``."""

from __future__ import annotations

import math

import torch
from torch import nn

from ddpx import health
from ddpx.ddp.fronts.lookup import replica_of
from ddpx.ddp.replica.replica import Replica


def set_weight(replica: Replica, weight: object) -> None:
    """Sets the weight of the next forward; see ``ddpx.set_weight()``."""
    try:
        replica.reducer.set_weight(_checked(replica, weight))
    except Exception as error:
        health.publish_fault(replica.reducer.monitor, error, is_of_module=False)
        raise


def averages_by_weight(model: nn.Module) -> bool:
    """Whether the wrapper ``model`` has ``average="weights"``."""
    return replica_of(model).options.average == "weights"


def _checked(replica: Replica, weight: object) -> float | torch.Tensor:
    """The weight as a number, or as a tensor on a device, which the host must not read."""
    if replica.options.average != "weights":
        raise RuntimeError(
            f"{_place(replica)} averages with average={replica.options.average!r}, which needs no "
            'weights. Pass average="weights" at construction.'
        )
    number: object = weight
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise _no_weight(replica, f"a tensor of shape {tuple(weight.shape)}, {weight.dtype}")
        if weight.device.type != "cpu":
            return weight
        number = weight.item()
    if isinstance(number, (bool, complex)) or not hasattr(type(number), "__float__"):
        raise _no_weight(replica, repr(number))
    try:
        value = float(number)  # type: ignore[arg-type]
    except OverflowError:  # an integer beyond the range of floats
        value = math.inf
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{_place(replica)} got the weight {value} by ddpx.set_weight(). A weight is finite, "
            "and 0 or more. Pass the number of items, such as tokens, that the loss of the next "
            "forward sums over."
        )
    return value


def _place(replica: Replica) -> str:
    return f"[ddpx rank {replica.group.rank()}] the {replica.name}"


def _no_weight(replica: Replica, value: str) -> TypeError:
    return TypeError(
        f"{_place(replica)} got the weight {value} by ddpx.set_weight(). Pass a number, or a "
        "tensor with one real number."
    )
