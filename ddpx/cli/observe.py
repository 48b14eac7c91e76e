"""Lets others know when a model is wrapped, by DDP or by ReducerDDP; how wrappers end."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.module import ReducerDDP

_GRACE_S = 0.1


def on_wrap(callback: Callable[[nn.Module], None]) -> None:
    """From here on ``callback`` is called with each new wrapper of this process."""
    for cls in (DistributedDataParallel, ReducerDDP):
        cls.__init__ = _observed(cls.__init__, callback)  # type: ignore[method-assign]


def _observed(
    init: Callable[..., None], callback: Callable[[nn.Module], None]
) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
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
        group = wrapper.process_group
        assert isinstance(group, dist.ProcessGroup)
        self._groups.append(group)

    def let_go(self) -> None:
        """To be called at the end of the script. Waits a moment, so that threads get done."""
        time.sleep(_GRACE_S)
        self._groups.clear()
