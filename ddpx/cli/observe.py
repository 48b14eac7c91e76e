"""Lets others know when a model is wrapped, by DDP or by ReducerDDP; how wrappers end."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.ddp.module import ReducerDDP

_GRACE_S = 0.1


WRAPPERS: tuple[type[nn.Module], ...] = (DistributedDataParallel, ReducerDDP)


def on_wrap(
    callback: Callable[[nn.Module], None], wrappers: Collection[type[nn.Module]] = WRAPPERS
) -> None:
    """From here on ``callback`` is called with each new wrapper of this process."""
    for cls in wrappers:
        cls.__init__ = _observed(cls, callback, wrappers)  # type: ignore[method-assign]


def _observed(
    cls: type[nn.Module],
    callback: Callable[[nn.Module], None],
    wrappers: Collection[type[nn.Module]],
) -> Callable[..., None]:
    init = cls.__init__

    @functools.wraps(init)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # A wrapper that derives from DDP calls DDP's __init__ within its own.
        if next(base for base in type(self).__mro__ if base in wrappers) is cls:
            callback(self)

    return wrapped


class HeldGroups:
    """The process groups of all wrappers, until the script has ended.

    If a wrapper that goes is the last to hold its group, gloo's threads are joined, of which one
    may still be dropping its last work. It needs the GIL for that, and the joining thread can have
    it: torch's Reducer does not let go of it.
    """

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []

    def add(self, wrapper: nn.Module) -> None:
        group = getattr(wrapper, "process_group", None)
        if isinstance(group, dist.ProcessGroup):
            self._groups.append(group)

    def let_go(self) -> None:
        """To be called at the end of the script. Waits a moment, so that threads get done."""
        time.sleep(_GRACE_S)
        self._groups.clear()
