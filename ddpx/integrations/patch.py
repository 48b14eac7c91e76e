"""Replaces torch's DDP by ReducerDDP, or by another wrapper, in this process."""

from __future__ import annotations

import functools
import importlib
import sys
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.ddp.module import ReducerDDP

# The modules from which scripts import DDP.
_PUBLIC = ("torch.nn.parallel", "torch.nn.parallel.distributed")

_replicate_keeps_ddp: ContextVar[bool] = ContextVar("_replicate_keeps_ddp", default=False)
_wrapper: type[nn.Module] | None = None  # the class that replaces DDP; None without a replacement


def patch_ddp(wrapper: type[nn.Module] = ReducerDDP) -> Patch:
    """Makes code of this process that calls DistributedDataParallel (DDP) get a ReducerDDP.

    The replacement includes code that was imported before the call. A class that is derived from
    DDP after the call derives from ReducerDDP. A child process is not included, unless the child
    calls ``patch_ddp()`` itself. ``torch.distributed._composable.replicate`` keeps torch's DDP.

    ``undo()`` of the result ends the replacement. In a ``with`` statement, the end of the block
    does so. A name that a module imported during the replacement keeps ReducerDDP. The command
    ``ddpx run`` makes this call before the command starts a script.

    Args:
        wrapper: The class in the place of DDP. The class takes the arguments of DDP. Default
            :class:`ReducerDDP`.

    Returns:
        A :class:`Patch`, which undoes the replacement. A second call with the same class changes
        nothing, and ``undo()`` of its result changes nothing.

    Raises:
        RuntimeError: Another class is in the place of DDP. Later: a class that was derived from
            DDP before this call is instantiated. Such a class would train with DDP.

    Example:
        >>> with ddpx.patch_ddp():
        ...     model = nn.parallel.DistributedDataParallel(module)
        >>> isinstance(model, ddpx.ReducerDDP)
        True
    """
    if _wrapper is wrapper:
        return Patch(None)
    if _wrapper is not None:
        raise _patched_with_another(_wrapper, wrapper)
    return Patch(wrapper)


class Patch:
    """A replacement of DDP, from :func:`patch_ddp`. Also a context manager.

    Example:
        >>> with ddpx.patch_ddp() as patch:
        ...     nn.parallel.DistributedDataParallel is ddpx.ReducerDDP
        True
    """

    def __init__(self, wrapper: type[nn.Module] | None) -> None:
        self._replaced: list[tuple[Any, str]] = []
        if wrapper is not None:
            self._apply(wrapper)

    def undo(self) -> None:
        """Restores DDP. Existing wrappers do not change. A second call has no effect.

        Example:
            >>> patch = ddpx.patch_ddp()
            >>> patch.undo()
            >>> nn.parallel.DistributedDataParallel is ddpx.ReducerDDP
            False
        """
        global _wrapper
        if not self._replaced:
            return
        replacement, _wrapper = _wrapper, None
        for module, name in self._replaced:
            if getattr(module, name, None) is replacement:
                setattr(module, name, DistributedDataParallel)
        self._replaced.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()

    # torch's own modules need the name for isinstance(). The new DDP.__new__ serves their calls.
    def _apply(self, wrapper: type[nn.Module]) -> None:
        global _wrapper
        if DistributedDataParallel.__new__ is object.__new__:
            DistributedDataParallel.__new__ = _new  # type: ignore[method-assign]
            _leave_out_replicate()
        _wrapper = wrapper
        for name, module in list(sys.modules.items()):
            package = name.partition(".")[0]
            if package == "ddpx" or (package == "torch" and name not in _PUBLIC):
                continue
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                if value is DistributedDataParallel:
                    setattr(module, attribute, wrapper)
                    self._replaced.append((module, attribute))


def _new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    if _wrapper is None or _replicate_keeps_ddp.get() or _wrapper in cls.__mro__:
        return object.__new__(cls)
    if cls is not DistributedDataParallel:
        raise _derived_too_early(cls)
    if DistributedDataParallel in _wrapper.__mro__:
        return object.__new__(_wrapper)  # the interpreter calls its __init__
    return _wrapper(*args, **kwargs)


def _leave_out_replicate() -> None:
    """Keeps DDP in ``replicate(module)``, which calls parts of DDP's forward itself."""
    state = importlib.import_module("torch.distributed._composable.replicate")._ReplicateState
    init = state.init

    @functools.wraps(init)
    def init_with_ddp(*args: Any, **kwargs: Any) -> None:
        token = _replicate_keeps_ddp.set(True)
        try:
            init(*args, **kwargs)
        finally:
            _replicate_keeps_ddp.reset(token)

    state.init = init_with_ddp


# ---- errors --------------------------------------------------------------------------------------


def _derived_too_early(cls: type) -> RuntimeError:
    return RuntimeError(
        f"{cls.__module__}.{cls.__qualname__} was derived from torch's DistributedDataParallel "
        f"before ddpx.patch_ddp() was called. {cls.__qualname__} would train with DDP. Call "
        f"ddpx.patch_ddp() before {cls.__module__} defines this class."
    )


def _patched_with_another(present: type, wrapper: type) -> RuntimeError:
    return RuntimeError(
        f"patch_ddp({wrapper.__name__}) failed, because {present.__name__} already replaces "
        f"DistributedDataParallel. Undo the replacement by {present.__name__} first."
    )
