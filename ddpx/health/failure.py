"""The errors that a process group raises when it cannot continue."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ddpx import _C
from ddpx.frames import innermost_frames


@dataclass(frozen=True)
class LostRank:
    """A rank that is lost, or that is late, in ``RankError.lost``.

    Attributes:
        rank: The rank in the process group of the wrapper. The error's text has the global rank.
        host: The host of the rank. ``"unknown"`` if the rank had not wrapped its model, or if so
            many ranks are lost that the details of this one are left out.
        pid: The process ID. 0 if unknown.
        what: The event, for example ``"was killed by SIGKILL"``.
        error: The text of the exception that ended the rank's script. Empty if there was none, or
            if it is unknown.
        last_seen: The last known step, phase and bucket of the rank. Empty if unknown.
    """

    rank: int
    host: str
    pid: int
    what: str
    error: str
    last_seen: str


class RankError(dist.DistBackendError):
    """A process group cannot continue because of one of its ranks.

    The base of :class:`ddpx.RankFailure`, :class:`ddpx.RankStalled` and
    :class:`ddpx.RankMismatch`. It derives from ``torch.distributed.DistBackendError``, and that
    class from ``RuntimeError``. Code that catches these errors keeps working. The gradients of the
    step are not averaged.

    Attributes:
        lost: The lost or late ranks, each with its host, its process and the event. Empty if no
            rank is lost or late.
        reported_by: The rank that raises the error, in the process group of the wrapper.
        step: The synchronized step of this rank, counted from 0. -1 before the first step.
        phase: The activity of this rank, in words.
        bucket: The index of the bucket that this rank waits for. None if there is none.
        params: The names of the parameters in this bucket.
        reason: What happened, in words: the exception of the first lost rank, else the event.

    Example:
        >>> try:
        ...     model(inputs).sum().backward()  # rank 1 is killed in this step
        ... except ddpx.RankError as error:
        ...     print(type(error).__name__, error.lost_ranks)
        RankFailure (1,)
    """

    def __init__(
        self,
        text: str,
        lost: tuple[LostRank, ...] = (),
        reported_by: int = -1,
        step: int = -1,
        phase: str = "",
        bucket: int | None = None,
        params: tuple[str, ...] = (),
        reason: str = "",
    ) -> None:
        super().__init__(text)
        self.lost = lost
        self.reported_by = reported_by
        self.step = step
        self.phase = phase
        self.bucket = bucket
        self.params = params
        self.reason = reason

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """The lost or late ranks, in the process group of the wrapper."""
        return tuple(lost.rank for lost in self.lost)


class RankFailure(RankError):
    """Ranks died, or left while other ranks wait for them. Every surviving rank raises this error.

    :func:`ddpx.shrink` continues training on the survivors.

    Example:
        >>> try:
        ...     model(inputs).sum().backward()  # rank 1 is killed in this step
        ... except ddpx.RankFailure as failure:
        ...     print(failure.lost_ranks, failure.reason)
        (1,) was killed by SIGKILL
    """


class RankStalled(RankError):
    """Running ranks did not arrive in time, or communication took too long.

    The time limit is ``error`` of :func:`ddpx.set_stall_timeout`, or the timeout of the process
    group. ``lost`` has the late ranks. If no rank is late, ``lost`` is empty.

    Example:
        >>> ddpx.set_stall_timeout(warn=0.2, error=0.3)
        >>> try:
        ...     model(inputs).sum().backward()  # rank 1 sleeps in its data loader
        ... except ddpx.RankStalled as stalled:
        ...     print(stalled.lost_ranks)
        (1,)
    """


class RankMismatch(RankError):
    """Ranks made different collective calls. All ranks raise this error.

    No rank is lost, so ``lost`` is empty.

    Example:
        >>> models = [model, ddpx.ReducerDDP(module)]
        >>> if dist.get_rank() == 1:
        ...     models.reverse()  # the mistake
        >>> try:
        ...     for wrapper in models:
        ...         wrapper(inputs).square().sum().backward()
        ... except ddpx.RankMismatch as mismatch:
        ...     print(mismatch.lost_ranks)
        ()
    """


# A traceback shows the name under which users catch the error.
for _error in (RankError, RankFailure, RankStalled, RankMismatch):
    _error.__module__ = "ddpx"

_BY_NAME = {f"ddpx.{error.__name__}": error for error in (RankFailure, RankStalled, RankMismatch)}


def from_report(report: _C.RankReport) -> RankError:
    """Returns the exception for a report of the core. The core calls this function."""
    lost = tuple(
        LostRank(each.rank, each.host, each.pid, each.what, each.cause, each.last_seen)
        for each in report.lost
    )
    text = report.text
    if report.own_stack:
        text += f"\nWhen the others gave up, this rank was at:{innermost_frames(report.own_stack)}"
    return _BY_NAME[report.error_name](
        text,
        lost,
        report.rank,
        report.step,
        report.phase,
        report.bucket,
        tuple(report.params),
        lost[0].error or lost[0].what if lost else report.how,
    )
