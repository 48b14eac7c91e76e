"""torch's function ``replicate`` by :func:`ddpx.replicate`, for ``patch_ddp(replicate=True)``.

The function has the arguments and the effects of ``torch.distributed._composable.replicate`` with
DDP: the module gets its front in its first forward, buffers are not synchronized, and the module
has the methods ``set_requires_gradient_sync()`` and ``register_comm_hook()``.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ddpx.ddp.fronts.copies import make_copies_plain
from ddpx.ddp.fronts.forward_hooks import Before, Hook, HookFront
from ddpx.ddp.fronts.front import Front
from ddpx.ddp.fronts.lookup import hooks_of
from ddpx.ddp.replicate import install
from ddpx.ddp.replicate import replicate as replicate_by_ddpx
from ddpx.params.dtensors import params_under_fsdp

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)
# Arguments of the function with FSDP, and what to do instead.
_OF_FSDP = {
    "mp_policy": "Pass mixed_precision=, as for DDP.",
    "offload_policy": "Leave it out: parameters stay on their device.",
    "dp_mesh_dims": "Pass a mesh of one dimension as device_mesh.",
}


class State:
    """The state of one module, which ``replicate.state(module)`` returns.

    The names that begin with an underscore are those of torch's state, which scripts use.
    """

    def __init__(self, bound: inspect.BoundArguments, ignored: Iterable[nn.Parameter]) -> None:
        self._bound = bound
        self._ignored = {id(param) for param in ignored}
        self._syncs = True
        self._comm_hooks: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._ddp_weakref: Callable[[], Front | None] = lambda: None

    @property
    def _no_sync(self) -> bool:
        return not self._syncs

    @_no_sync.setter
    def _no_sync(self, value: bool) -> None:
        self._syncs = not value
        if (front := self._ddp_weakref()) is not None:
            front.require_backward_grad_sync = self._syncs

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        """Registers a communication hook, in the first forward if none has run."""
        front = self._ddp_weakref()
        if front is None:
            self._comm_hooks.append((args, kwargs))
        else:
            front.register_comm_hook(*args, **kwargs)

    def start(self, module: nn.Module) -> HookFront:
        """Makes the front of ``module``."""
        sharded = set(params_under_fsdp(module))
        ignored = {
            name
            for name, param in module.named_parameters()
            if id(param) in self._ignored or name in sharded
        }
        ignored |= {name for name, _ in module.named_buffers()}
        self._bound.arguments["module"] = module
        install(module, self._bound, frozenset(ignored))
        front = hooks_of(module)
        assert front is not None
        self._ddp_weakref = weakref.ref(front)
        front.require_backward_grad_sync = self._syncs
        for args, kwargs in self._comm_hooks:
            front.register_comm_hook(*args, **kwargs)
        self._bound.arguments.clear()  # the process group, for example, may end before the module
        return front


_states: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()


class Replicated:
    """The methods of a module that torch's function has changed. Copies have the module's class."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Sets whether backwards average gradients."""
        _state(cast(nn.Module, self))._no_sync = not requires_gradient_sync

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        """Makes a hook communicate each bucket; the arguments are those of DDP's method."""
        _state(cast(nn.Module, self)).register_comm_hook(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[1][:1] == (type(self),):
            own = type(self).__mro__[2]
            return (own.__new__, (own, *reduced[1][1:]), *reduced[2:])
        return reduced


class _First(Hook):
    """The hook before the first forward."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        front = self._state.start(module)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is self]:
            del module._forward_pre_hooks[key]
        return Before(front).begin(sys._getframe(1), args, kwargs)


def replicate(
    module: _ModuleT,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    mesh: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    device_id: Any = inspect.Parameter.empty,
    **options: Any,
) -> _ModuleT:
    """Averages the gradients of ``module`` from its first forward on.

    Args:
        module: The module.
        ignored_modules: Modules whose parameters take no part.
        mesh: As ``device_mesh`` of DDP.
        ignored_params: Parameters that take no part.
        device_id: The device of the module. Forwards move inputs to this device.
        options: Arguments of DDP.

    Raises:
        RuntimeError: ``device_id`` is no device; or the function was called with ``module`` before;
            or ``fully_shard()`` manages the module.
        NotImplementedError: An argument has a meaning for FSDP only.
        TypeError: ``module`` is no module, or DDP has no such argument.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"replicate() takes a torch.nn.Module, but got {type(module).__name__}. With "
            "ddpx.patch_ddp(replicate=True), call it for each module."
        )
    if module in _states:
        raise RuntimeError(
            f"replicate() was called twice with the same {type(module).__name__}. Leave out one "
            "of the calls."
        )
    _refuse_options_of_fsdp(options)
    if device_id is not inspect.Parameter.empty:
        if not isinstance(device_id, (int, torch.device)):
            raise RuntimeError(
                f"Expected device_id to be int or torch.device, but got {type(device_id)}"
            )
        on_cpu = isinstance(device_id, torch.device) and device_id.type == "cpu"
        options["device_ids"] = None if on_cpu else [device_id]
    if mesh is not None:
        options["device_mesh"] = mesh
    if params_under_fsdp(module) == [name for name, _ in module.named_parameters()]:
        raise RuntimeError(
            "Cannot apply `replicate()` on a Module already managed by `fully_shard`. Pass a mesh "
            "of two dimensions to fully_shard()."
        )
    bound = inspect.signature(replicate_by_ddpx).bind(module, **options)
    del bound.arguments["module"]  # the state must not keep the module
    params = [param for each in ignored_modules or () for param in each.parameters()]
    state = State(bound, [*params, *(ignored_params or ())])
    _states[module] = state
    module.register_forward_pre_hook(_First(state), prepend=True, with_kwargs=True)
    cls = type(module)
    module.__class__ = type(f"DDP{cls.__name__}", (Replicated, cls), {})
    make_copies_plain(module)
    return module


def _state(module: nn.Module) -> State:
    """The state of a module that was passed to :func:`replicate`."""
    return _states[module]


replicate.state = _state  # type: ignore[attr-defined]


def _refuse_options_of_fsdp(options: dict[str, Any]) -> None:
    """Takes arguments for FSDP out of ``options``, which must have their defaults."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name in _OF_FSDP.keys() & options.keys():
        value = options.pop(name)
        kind = {"mp_policy": "MixedPrecisionPolicy", "offload_policy": "OffloadPolicy"}.get(name)
        default = getattr(fsdp, kind)() if fsdp is not None and kind is not None else None
        if value is not None and not (type(value) is type(default) and value == default):
            raise NotImplementedError(
                f"replicate({name}={value!r}) needs FSDP, and ddpx.patch_ddp(replicate=True) has "
                f"replaced it. {_OF_FSDP[name]} Or call ddpx.patch_ddp() without replicate=True."
            )
