"""Finds the front of a model."""

from __future__ import annotations

from typing import cast

from torch import nn

from ddpx import errors
from ddpx.ddp.front import ATTRIBUTE, Front
from ddpx.ddp.replica import Replica


def front_of(model: object) -> Front:
    """The only front in ``model``: of ``model`` itself, or of a module in it.

    Raises:
        TypeError: ``model`` has no front, or has several.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found: list[Front] = []
    for module in modules:
        if isinstance(module.__dict__.get(ATTRIBUTE), Replica):
            found.append(cast(Front, module))
    if len(found) != 1:
        raise errors.not_one_wrapper(model, len(found))
    return found[0]


def replica_of(model: object) -> Replica:
    """The replica of the only front in ``model``; see :func:`front_of`."""
    return front_of(model)._ddpx
