"""Finds the front of a model: a wrapper, or the hooks of ``ddpx.replicate``."""

from __future__ import annotations

from typing import cast

from torch import nn

from ddpx import errors, health
from ddpx.ddp.front import ATTRIBUTE, Front
from ddpx.ddp.hooks import Before, HookFront
from ddpx.ddp.replica import Replica


def hooks_of(module: nn.Module) -> HookFront | None:
    """The front whose hooks are on ``module``. None without such hooks."""
    hooks = module.__dict__.get("_forward_pre_hooks", {}).values()
    return next((hook.front for hook in hooks if isinstance(hook, Before)), None)


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
        if (front := hooks_of(module)) is not None:
            found.append(front)
    if len(found) != 1:
        raise errors.not_one_wrapper(model, len(found))
    return found[0]


def replica_of(model: object) -> Replica:
    """The replica of the only front in ``model``; see :func:`front_of`."""
    return front_of(model)._ddpx


health.find_fronts_by(front_of)
