"""Replaces torch's DDP by ReducerDDP, or by another wrapper, in this process."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Collection
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import settings
from ddpx.ddp.module import ReducerDDP
from ddpx.integrations import torch_replicate

_NAME = DistributedDataParallel.__name__
# The modules from which scripts import DDP.
_PUBLIC = ("torch.nn.parallel", "torch.nn.parallel.distributed")
# The modules from which scripts import torch's function replicate.
_OF_REPLICATE = ("torch.distributed._composable", "torch.distributed._composable.replicate")

_replicate_keeps_ddp: ContextVar[bool] = ContextVar("_replicate_keeps_ddp", default=False)
_replacement: _Replacement | None = None  # what replaces DDP; None without a replacement


def patch_ddp(wrapper: type[nn.Module] = ReducerDDP, *, replicate: bool = False) -> Patch:
    """Makes code of this process that calls DistributedDataParallel (DDP) get a ReducerDDP.

    ReducerDDP then has DDP's class name, because scripts unwrap models by this name. Its module is
    still ``ddpx.ddp.module``.

    The replacement includes code that was imported before the call. A class that is derived from
    DDP after the call derives from ReducerDDP. A child process is not included, unless the child
    calls ``patch_ddp()`` itself.

    ``torch.distributed._composable.replicate`` keeps torch's DDP, unless ``replicate`` is True.
    Code that calls this function then gets a module with the hooks of :func:`ddpx.replicate`.

    ``undo()`` of the result ends the replacement. In a ``with`` statement, the end of the block
    does so. A name that a module imported during the replacement keeps ReducerDDP. The command
    ``ddpx run`` makes this call before the command starts a script.

    Args:
        wrapper: The class in the place of DDP. The class takes the arguments of DDP. Default
            :class:`ReducerDDP`.
        replicate: Also replace torch's function ``replicate``. Default False.

    Returns:
        A :class:`Patch`, which undoes the replacement. A second call with the same class changes
        nothing, and ``undo()`` of its result changes nothing.

    Raises:
        TypeError: ``wrapper`` is not a class of modules, or ``replicate`` is no truth value.
        RuntimeError: Another class is in the place of DDP. Later: a class that was derived from
            DDP before this call is instantiated. Such a class would train with DDP.

    Example:
        >>> with ddpx.patch_ddp():
        ...     model = nn.parallel.DistributedDataParallel(module)
        >>> isinstance(model, ddpx.ReducerDDP)
        True
    """
    if not (isinstance(wrapper, type) and issubclass(wrapper, nn.Module)):
        raise TypeError(
            f"patch_ddp() takes a class derived from torch.nn.Module, but got {wrapper!r}. Pass "
            "ddpx.ReducerDDP, or no argument."
        )
    replicate = settings.flag("replicate", replicate)
    if _replacement is not None:
        if _replacement.wrapper is wrapper:
            return Patch(None, replicate)
        raise RuntimeError(
            f"patch_ddp({wrapper.__name__}) failed, because {_replacement.own_name} already "
            f"replaces DistributedDataParallel. Undo the replacement by {_replacement.own_name} "
            "first."
        )
    return Patch(wrapper, replicate)


class Patch:
    """A replacement of DDP, from :func:`patch_ddp`. Also a context manager.

    Example:
        >>> with ddpx.patch_ddp() as patch:
        ...     nn.parallel.DistributedDataParallel is ddpx.ReducerDDP
        True
    """

    def __init__(self, wrapper: type[nn.Module] | None, replicate: bool = False) -> None:
        self._classes: list[tuple[Any, str]] = []
        self._functions: list[tuple[Any, str]] = []
        if wrapper is not None:
            self._apply(wrapper)
        if replicate:
            self._functions = _replace_names(
                _replicate_of_torch(), torch_replicate.replicate, _OF_REPLICATE
            )

    def undo(self) -> None:
        """Restores DDP. Existing wrappers do not change. A second call has no effect.

        Example:
            >>> patch = ddpx.patch_ddp()
            >>> patch.undo()
            >>> nn.parallel.DistributedDataParallel is ddpx.ReducerDDP
            False
        """
        global _replacement
        _restore_names(self._functions, torch_replicate.replicate, _replicate_of_torch())
        if not self._classes or _replacement is None:
            return
        replacement, _replacement = _replacement, None
        replacement.restore_name()
        _restore_names(self._classes, replacement.wrapper, DistributedDataParallel)

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
        global _replacement
        if DistributedDataParallel.__new__ is object.__new__:
            DistributedDataParallel.__new__ = _new  # type: ignore[method-assign]
            _leave_out_replicate()
        _replacement = _Replacement(wrapper)
        self._classes = _replace_names(DistributedDataParallel, wrapper, _PUBLIC)


def _replace_names(value: object, new: object, of_torch: Collection[str]) -> list[tuple[Any, str]]:
    """Puts ``new`` in the place of ``value`` in all modules. Of torch, only in ``of_torch``."""
    replaced = []
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package == "ddpx" or (package == "torch" and name not in of_torch):
            continue
        for attribute, each in list(getattr(module, "__dict__", {}).items()):
            if each is value:
                setattr(module, attribute, new)
                replaced.append((module, attribute))
    return replaced


def _restore_names(replaced: list[tuple[Any, str]], new: object, value: object) -> None:
    for module, name in replaced:
        if getattr(module, name, None) is new:
            setattr(module, name, value)
    replaced.clear()


@functools.cache
def _replicate_of_torch() -> object:
    return importlib.import_module(_OF_REPLICATE[1]).replicate


class _Replacement:
    """The class in the place of DDP. It has DDP's name, because many scripts unwrap by that name.

    Attributes:
        wrapper: The class.
        own_name: The name of the class before and after the replacement.
    """

    def __init__(self, wrapper: type[nn.Module]) -> None:
        self.wrapper = wrapper
        self.own_name = wrapper.__name__
        self._own_qualname = wrapper.__qualname__
        wrapper.__name__ = wrapper.__qualname__ = _NAME
        # Pickles find the class under its new name.
        module = sys.modules.get(wrapper.__module__)
        self._module = None if module is None or hasattr(module, _NAME) else module
        if self._module is not None:
            setattr(self._module, _NAME, wrapper)

    def restore_name(self) -> None:
        """Gives the class its own name back."""
        self.wrapper.__name__, self.wrapper.__qualname__ = self.own_name, self._own_qualname
        if self._module is not None:
            delattr(self._module, _NAME)


def _new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    wrapper = None if _replacement is None else _replacement.wrapper
    if wrapper is None or _replicate_keeps_ddp.get() or wrapper in cls.__mro__:
        return object.__new__(cls)
    if cls is not DistributedDataParallel:
        raise RuntimeError(
            f"{cls.__module__}.{cls.__qualname__} was derived from torch's DistributedDataParallel "
            f"before ddpx.patch_ddp() was called. {cls.__qualname__} would train with DDP. Call "
            f"ddpx.patch_ddp() before {cls.__module__} defines this class."
        )
    if DistributedDataParallel in wrapper.__mro__:
        return object.__new__(wrapper)  # the interpreter calls its __init__
    return wrapper(*args, **kwargs)


def _leave_out_replicate() -> None:
    """Keeps DDP in ``replicate(module)``, which calls parts of DDP's forward itself."""
    module = importlib.import_module(_OF_REPLICATE[1])
    state = getattr(module, "_ReplicateState", None)  # a later torch may have no such class
    if state is None:
        return
    init = state.init

    @functools.wraps(init)
    def init_with_ddp(*args: Any, **kwargs: Any) -> None:
        token = _replicate_keeps_ddp.set(True)
        try:
            init(*args, **kwargs)
        finally:
            _replicate_keeps_ddp.reset(token)

    state.init = init_with_ddp
