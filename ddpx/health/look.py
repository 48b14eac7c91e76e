"""What the ranks of a wrapper's group are doing, for people and scripts that ask."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING

from ddpx import _C, errors
from ddpx.settings import seconds

if TYPE_CHECKING:
    from ddpx.module import ReducerDDP

_MOST_S = 86400.0


@dataclass(frozen=True)
class RankStatus:
    """Another rank, as this one sees it.

    Attributes:
        rank: in the wrapper's process group.
        host: where it runs.
        pid: its process.
        alive: False once its process has ended. A rank of another machine counts as alive.
        doing: its step, phase and bucket, in words; None if it has not told anything.
        since_s: for how many seconds.
    """

    rank: int
    host: str
    pid: int
    alive: bool
    doing: str | None
    since_s: float | None


def ranks(model: ReducerDDP) -> list[RankStatus]:
    """The other ranks that have wrapped their model, in order. Asks nobody: they need not answer.

    Raises:
        RuntimeError: nobody watches: one rank, or ``DDPX_HEALTH=0``.
    """
    seen = _monitor(model).ranks()
    return [
        RankStatus(
            rank["rank"], rank["host"], rank["pid"], rank["alive"], rank["doing"], rank["since_s"]
        )
        for rank in seen
        if rank
    ]


def stack_of(model: ReducerDDP, rank: int, timeout_s: float = 2.0) -> str | None:
    """The Python stacks of another rank of this machine; None if it does not answer.

    A rank that is stopped, or that holds the GIL in native code, does not.

    Raises:
        RuntimeError: nobody watches: one rank, or ``DDPX_HEALTH=0``.
        TypeError: ``rank`` is no integer, or ``timeout_s`` no number.
        ValueError: there is no such other rank; that is no time to wait.
    """
    monitor = _monitor(model)
    rank = index(rank)
    if not 0 <= rank < model.process_group.size() or rank == monitor.rank:
        raise errors.no_other_rank(rank, model.process_group.size())
    timeout_s = min(seconds("timeout_s", timeout_s), _MOST_S)
    stack: str | None = monitor.stack_of(rank, timedelta(seconds=timeout_s))
    return stack


def _monitor(model: ReducerDDP) -> _C.Monitor:
    if not hasattr(model, "process_group"):
        raise errors.no_wrapper(model)
    monitor = _C.monitor_of(model.process_group)
    if monitor is None:
        raise errors.nobody_watches()
    return monitor
