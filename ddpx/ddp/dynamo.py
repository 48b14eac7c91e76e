"""Tells torch.compile which wrapper runs. torch.compile splits graphs at its buckets."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class _Running(threading.local):
    """The wrappers of one thread whose forward runs. The outermost wrapper is first."""

    def __init__(self) -> None:
        self.wrappers: list[nn.Module] = []


_running = _Running()


def active_wrapper(wrapper: nn.Module) -> AbstractContextManager[None]:
    """While the context lasts, ``wrapper`` is the active DDP module that Dynamo asks for.

    Dynamo asks one place for all threads. The end of the context restores the outer wrapper of the
    same thread. A wrapper of another thread is not restored, because its forward may have ended
    meanwhile, and nothing would remove it then.
    """
    # Without Dynamo, nothing is compiled. The disabled function would import Dynamo: 0.8 s.
    return (_disabled if "torch._dynamo" in sys.modules else _active)(wrapper)


def _activate(wrapper: nn.Module) -> Iterator[None]:
    """The body of ``active_wrapper()``."""
    outer = DistributedDataParallel._active_ddp_module
    if _running.wrappers:
        outer = _running.wrappers[-1]  # type: ignore[assignment]
    elif DistributedDataParallel not in type(outer).__mro__:  # a ReducerDDP of another thread
        outer = None
    _running.wrappers.append(wrapper)
    DistributedDataParallel._active_ddp_module = wrapper  # type: ignore[assignment]
    try:
        yield
    finally:
        _running.wrappers.pop()
        DistributedDataParallel._active_ddp_module = outer


_active = contextmanager(_activate)
_disabled = contextmanager(torch._disable_dynamo(_activate, recursive=False))
