"""Finds the front of a model: a wrapper, or the hooks of ``ddpx.replicate``."""

from __future__ import annotations

from typing import cast

from torch import nn

from ddpx import errors, health
from ddpx.ddp.fronts.forward_hooks import Before, HookFront
from ddpx.ddp.fronts.front import ATTRIBUTE, Front
from ddpx.ddp.replica.replica import Replica


def hooks_of(module: nn.Module) -> HookFront | None:
    """The front whose hooks are on ``module``. None without such hooks."""
    hooks = module.__dict__.get("_forward_pre_hooks", {}).values()
    return next((hook.front for hook in hooks if isinstance(hook, Before)), None)


def _own_front(module: nn.Module) -> Front | None:
    if isinstance(module.__dict__.get(ATTRIBUTE), Replica):
        return cast(Front, module)
    return hooks_of(module)


def front_of(model: object) -> Front:
    """The front of ``model`` itself; without one, the only front of the modules in it.

    Raises:
        TypeError: ``model`` has no front, and the modules in it have none or several.
    """
    if not isinstance(model, nn.Module):
        raise errors.not_one_wrapper(model, 0)
    if (front := _own_front(model)) is not None:
        return front
    found = [front for module in model.modules() if (front := _own_front(module)) is not None]
    if len(found) != 1:
        raise errors.not_one_wrapper(model, len(found))
    return found[0]


def replica_of(model: object) -> Replica:
    """The replica of the only front in ``model``; see :func:`front_of`."""
    return front_of(model)._ddpx


health.find_fronts_by(front_of)
