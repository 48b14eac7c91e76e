"""The current activity of the ranks of a wrapper's group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from operator import index
from typing import Protocol

import torch.distributed as dist
from torch import nn

from ddpx import _C, errors
from ddpx.settings import seconds


class Wrapper(Protocol):
    """The part of a wrapper that this module uses."""

    @property
    def process_group(self) -> dist.ProcessGroup: ...


_MOST_S = 86400.0
# Each finds the front of a model that has no process group. ddpx.ddp, a higher package, adds one.
_finders: list[Callable[[object], Wrapper]] = []


def find_fronts_by(finder: Callable[[object], Wrapper]) -> None:
    """Makes functions for wrappers take other models, whose front ``finder`` returns."""
    _finders.append(finder)


@dataclass(frozen=True)
class RankStatus:
    """The state of a rank, as this rank knows it.

    Attributes:
        rank: The rank in the wrapper's process group.
        host: The host of the rank.
        pid: The process ID of the rank.
        alive: False if the process has ended. Always True for a rank on another machine.
        doing: The step, phase and bucket of the rank, in words. None if unknown.
        since_s: The duration of this activity, in seconds. None if unknown.
        is_this_rank: True for the rank that called :func:`ddpx.peer_status`.

    Example:
        >>> status = ddpx.peer_status(model)[1]
        >>> status.rank, status.alive, status.is_this_rank
        (1, True, False)
    """

    rank: int
    host: str
    pid: int
    alive: bool
    doing: str | None
    since_s: float | None
    is_this_rank: bool = False

    def __repr__(self) -> str:
        mark = " (this rank)" if self.is_this_rank else ""
        where = f"rank {self.rank}{mark} on {self.host}, pid {self.pid}"
        if not self.alive:
            return f"<RankStatus: {where}, has ended>"
        since = "" if self.since_s is None else f" for {self.since_s:.1f} s"
        return f"<RankStatus: {where}, {self.doing or 'alive'}{since}>"


def peer_status(model: Wrapper | nn.Module) -> list[RankStatus]:
    """Returns the state of all ranks that have wrapped their model, in order of rank.

    The call reads state that ranks publish. The other ranks do not need to respond.

    Args:
        model: The wrapper, or the replicated module.

    Returns:
        A :class:`~ddpx.health.RankStatus` for each rank, including this one.

    Raises:
        RuntimeError: The failure detector is off: the world size is 1, the process group has no
            store, or ``DDPX_HEALTH=0`` is set.

    Example:
        >>> for status in ddpx.peer_status(model):
        ...     print(status.rank, status.alive)
        0 True
        1 True
    """
    monitor = _monitor(_group(model))
    return [
        RankStatus(
            rank["rank"],
            rank["host"],
            rank["pid"],
            rank["alive"],
            rank["doing"],
            rank["since_s"],
            rank["rank"] == monitor.rank,
        )
        for rank in monitor.ranks()
        if rank
    ]


def peer_stack(
    model: Wrapper | nn.Module, rank: int, timeout: float | timedelta = 2.0
) -> str | None:
    """Returns the Python stacks of all threads of another rank on this machine.

    Args:
        model: The wrapper, or the replicated module.
        rank: The other rank, in the process group of ``model``.
        timeout: The time to wait for the answer, in seconds or as a timedelta. Default 2 s.

    Returns:
        The stacks as text. None if the rank does not answer in time. A rank does not answer while
        its process is stopped, or while native code holds the GIL.

    Raises:
        RuntimeError: The failure detector is off: the world size is 1, the process group has no
            store, or ``DDPX_HEALTH=0`` is set.
        TypeError: ``rank`` is not an integer, or ``timeout`` is neither a number nor a timedelta.
        ValueError: ``rank`` is not another rank of the group, or ``timeout`` is below 0.001 s.

    Example:
        >>> peer = 1 - dist.get_rank()
        >>> print(ddpx.peer_stack(model, peer))
        thread MainThread:
          ...
    """
    group = _group(model)
    monitor = _monitor(group)
    rank = index(rank)
    if not 0 <= rank < group.size() or rank == monitor.rank:
        raise ValueError(
            f"rank {rank!r} is not another rank of the process group of this wrapper, which has "
            f"{errors.count(group.size(), 'rank')}. Pass the number of another rank, "
            "counted from 0."
        )
    timeout_s = min(seconds("timeout", timeout), _MOST_S)
    stack: str | None = monitor.stack_of(rank, timedelta(seconds=timeout_s))
    return stack


def _group(model: object) -> dist.ProcessGroup:
    group = getattr(model, "process_group", None)
    for finder in () if isinstance(group, dist.ProcessGroup) else _finders:
        group = finder(model).process_group
    if not isinstance(group, dist.ProcessGroup):
        raise errors.not_one_wrapper(model, 0)
    return group


def _monitor(group: dist.ProcessGroup) -> _C.Monitor:
    monitor = _C.monitor_of(group)
    if monitor is None:
        raise errors.no_failure_detector()
    return monitor
