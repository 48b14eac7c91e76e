"""``ddpx.replicate``: averages the gradients of a module without a wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.ddp.arguments import agreement
from ddpx.ddp.fronts import construction
from ddpx.ddp.fronts.copies import make_copies_plain
from ddpx.ddp.fronts.forward_hooks import HookFront
from ddpx.ddp.fronts.lookup import hooks_of
from ddpx.ddp.module import ReducerDDP

_P = ParamSpec("_P")
_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


_PLACE = "    options\n"  # of the description of the arguments of ReducerDDP
_OF_WRAPPER = inspect.signature(ReducerDDP.__init__, eval_str=True)
_SIGNATURE = inspect.Signature([*_OF_WRAPPER.parameters.values()][1:])


class _Replicate(Protocol[_P]):
    """A function with the type of its argument, and with the options of a constructor."""

    def __call__(self, module: _ModuleT, *args: _P.args, **options: _P.kwargs) -> _ModuleT: ...


def _with_options_of(
    _: Callable[Concatenate[ReducerDDP, nn.Module, _P], None],
) -> Callable[[Callable[..., Any]], _Replicate[_P]]:
    """Gives a function of a module the parameters of a constructor."""

    def decorate(function: Callable[..., Any]) -> _Replicate[_P]:
        vars(function)["__signature__"] = _SIGNATURE
        described = inspect.getdoc(ReducerDDP) or ""
        options = described[described.find("    device_ids:") : described.find("\nRaises:")]
        function.__doc__ = (inspect.getdoc(function) or "").replace(_PLACE, options)
        return agreement.faults_reach_all_ranks(function)

    return decorate


@_with_options_of(ReducerDDP.__init__)
def replicate(module: _ModuleT, *args: Any, **options: Any) -> _ModuleT:
    """Averages the gradients of ``module`` over all ranks, without a wrapper.

    The module stays what it is: its class, attributes, methods and ``state_dict()`` do not change.
    Two forward hooks do the work of a wrapper. A backward averages gradients as with
    :class:`ReducerDDP`, also after a call of another method than ``forward``.
    ``ddpx.no_sync(module)`` and the other functions of ddpx take the module in place of a wrapper.

    Copies by ``copy.deepcopy``, ``pickle`` and ``torch.save`` are plain modules, whose gradients
    are not averaged. A second call on the same module replaces the options of the first call. The
    page docs/replicate.md compares this function with a wrapper.

    Args:
        module: The model, as for :class:`ReducerDDP`.
        options

    Returns:
        ``module`` itself.

    Raises:
        TypeError: ``module`` is a wrapper, or is compiled by TorchScript.
        Exception: What :class:`ReducerDDP` raises.

    Example:
        >>> replicated = ddpx.replicate(nn.Linear(4, 1))
        >>> replicated(inputs).sum().backward()
        >>> replicated.weight.grad
        tensor([[16., 16., 16., 16.]])
    """
    return install(module, _SIGNATURE.bind(module, *args, **options))


def install(
    module: _ModuleT,
    bound: inspect.BoundArguments,
    also_ignored: frozenset[str] = frozenset(),
) -> _ModuleT:
    """Puts a front on ``module``.

    Args:
        module: The module.
        bound: All arguments of :func:`replicate`.
        also_ignored: Names of parameters and buffers that take no part.
    """
    _check_kind(module)
    bound.apply_defaults()
    arguments = bound.arguments
    del arguments["module"], arguments["dim"]
    replica, place = construction.prepare(
        module, keeps_module=False, also_ignored=also_ignored, **arguments
    )
    front = HookFront(replica, place, arguments["device_mesh"])
    older = hooks_of(module)
    construction.complete(front)
    if older is not None:
        older.uninstall()
    front.install()
    make_copies_plain(module)
    return module


def unreplicate(module: _ModuleT) -> _ModuleT:
    """Ends the effect of :func:`replicate`. Gradients of ``module`` are local from here on.

    Args:
        module: A module that was passed to :func:`replicate`.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: ``module`` was not passed to :func:`replicate`.
        RuntimeError: A backward runs, or awaits :func:`finalize_backward`. Nothing has changed.

    Example:
        >>> plain = ddpx.unreplicate(ddpx.replicate(nn.Linear(4, 1)))
        >>> plain(inputs).sum().backward()
        >>> plain.weight.grad  # of this rank alone
        tensor([[8., 8., 8., 8.]])
    """
    front = hooks_of(module) if isinstance(module, nn.Module) else None
    if front is None:
        raise TypeError(
            f"ddpx.unreplicate() got a {type(module).__name__} that ddpx.replicate() does not "
            "average. Pass the module that was passed to ddpx.replicate()."
        )
    front.uninstall()
    return module


def _check_kind(module: object) -> None:
    """Raises TypeError if ``module`` cannot get hooks."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"ddpx.replicate() takes a torch.nn.Module, but got {type(module).__name__}. Pass the "
            "model itself: ddpx.replicate(model)."
        )
    if isinstance(module, DistributedDataParallel):
        raise TypeError(
            f"ddpx.replicate() got a {type(module).__name__}, which averages gradients already. "
            "Pass the wrapped module: ddpx.replicate(model.module)."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "ddpx.replicate() got a module that TorchScript has compiled, whose forward runs no "
            "hooks in Python. Pass the module to ReducerDDP."
        )
