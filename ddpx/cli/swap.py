"""Puts ReducerDDP in the place of torch's DDP, in this process, for good."""

from __future__ import annotations

import functools
import importlib
import sys
from contextvars import ContextVar
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddpx.cli import errors
from ddpx.module import ReducerDDP

# Where scripts import DDP from.
_PUBLIC = ("torch.nn.parallel", "torch.nn.parallel.distributed")

_torch_keeps_its_own: ContextVar[bool] = ContextVar("_torch_keeps_its_own", default=False)


def replace_ddp() -> None:
    """From here on whoever calls DDP gets a ReducerDDP.

    Two things make that so. The names are replaced, in torch's public modules and in all modules
    outside torch that hold it: classes derived from DDP then derive from ReducerDDP, and
    ``type(model) is DistributedDataParallel`` holds. And torch's class itself, which torch's own
    modules keep for ``isinstance`` (ReducerDDP is registered as a subclass), makes a ReducerDDP
    when it is called.
    """
    _except_in_replicate()
    DistributedDataParallel.__new__ = _new  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package == "ddpx" or (package == "torch" and name not in _PUBLIC):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is DistributedDataParallel:
                setattr(module, attribute, ReducerDDP)


def _new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    if _torch_keeps_its_own.get():
        return object.__new__(cls)
    if cls is not DistributedDataParallel:
        raise errors.derived_too_early(cls)
    # Not an instance in the sense of the interpreter, which therefore calls no __init__.
    return ReducerDDP(*args, **kwargs)


def _except_in_replicate() -> None:
    """``replicate(module)`` has no wrapper, but runs parts of DDP's forward by itself."""
    state = importlib.import_module("torch.distributed._composable.replicate")._ReplicateState
    init = state.init

    @functools.wraps(init)
    def init_with_torchs(*args: Any, **kwargs: Any) -> None:
        token = _torch_keeps_its_own.set(True)
        try:
            init(*args, **kwargs)
        finally:
            _torch_keeps_its_own.reset(token)

    state.init = init_with_torchs
