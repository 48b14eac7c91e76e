"""Callbacks for new wrappers and replicated modules, and the end of their process groups."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.ddp.fronts.construction import call_on_construction
from ddpx.ddp.fronts.forward_hooks import HookFront
from ddpx.ddp.module import ReducerDDP

_GRACE_S = 0.1


WRAPPERS: tuple[type[nn.Module], ...] = (DistributedDataParallel, ReducerDDP)


def on_wrap(
    callback: Callable[[nn.Module], None], wrappers: Collection[type[nn.Module]] = WRAPPERS
) -> None:
    """Calls ``callback`` with each later wrapper of this process."""
    for cls in wrappers:
        cls.__init__ = _observed(cls, callback, wrappers)  # type: ignore[method-assign]


def on_replicate(callback: Callable[[HookFront], None]) -> None:
    """Calls ``callback`` with the front of each module that is later passed to ddpx.replicate()."""

    def call(front: object, _: bool) -> None:
        if isinstance(front, HookFront):
            callback(front)

    call_on_construction(call)


def _observed(
    cls: type[nn.Module],
    callback: Callable[[nn.Module], None],
    wrappers: Collection[type[nn.Module]],
) -> Callable[..., None]:
    init = cls.__init__

    @functools.wraps(init)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # The __init__ of a class that derives from DDP calls DDP's __init__.
        if next(base for base in type(self).__mro__ if base in wrappers) is cls:
            callback(self)

    return wrapped


class HeldGroups:
    """Holds the process groups of all wrappers until the script has ended.

    Without this, the end of a wrapper may destroy its group, and wait for gloo's threads. A thread
    that releases its last work needs the GIL. torch's Reducer keeps the GIL during the wait, so
    that both threads would hang.
    """

    def __init__(self) -> None:
        self.num_wrappers = 0
        self._groups: list[dist.ProcessGroup] = []

    def add(self, wrapper: object) -> None:
        """Holds the group of ``wrapper``."""
        self.num_wrappers += 1
        group = getattr(wrapper, "process_group", None)
        if isinstance(group, dist.ProcessGroup):
            self._groups.append(group)

    def release(self) -> None:
        """Releases the groups. Called at the end of the script.

        Waits a moment first, so that gloo's threads finish their work.
        """
        time.sleep(_GRACE_S)
        self._groups.clear()
