"""The errors that say that a group has lost ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ddpx import _C


@dataclass(frozen=True)
class Casualty:
    """A lost rank, or a rank that is late, in ``RankFailure.casualties``.

    Attributes:
        rank: The rank in the process group of the wrapper. The error's text has the global rank.
        host: The host of the rank. ``"unknown"`` if the rank had not wrapped its model.
        pid: The process ID. 0 if unknown.
        what: The event, for example ``"was killed by SIGKILL"``.
        cause: The text of the exception that ended the rank's script. Empty if unknown.
        last_seen: The last known step, phase and bucket of the rank. Empty if unknown.
    """

    rank: int
    host: str
    pid: int
    what: str
    cause: str
    last_seen: str


class RankFailure(dist.DistBackendError):
    """Ranks died, or left while other ranks wait for them. Every surviving rank raises this error.

    The class derives from ``torch.distributed.DistBackendError``, which derives from
    ``RuntimeError``. Code that catches these errors keeps working. The gradients of the step are
    not averaged. :func:`shrink` continues training on the survivors.

    Attributes:
        casualties: The lost ranks, each with its host, its process and the cause.
        rank: The rank that raises the error.
        step: The synchronized step of this rank, counted from 0. -1 before the first step.
        phase: The activity of this rank, in words.
        bucket: The index of the bucket that this rank waits for. None if there is none.
        params: The names of the parameters in this bucket.

    Example:
        >>> try:
        ...     model(inputs).sum().backward()  # rank 1 is killed in this step
        ... except ddpx.RankFailure as failure:
        ...     print(failure.ranks, failure.casualties[0].what)
        (1,) was killed by SIGKILL
    """

    def __init__(
        self,
        text: str,
        casualties: tuple[Casualty, ...] = (),
        rank: int = -1,
        step: int = -1,
        phase: str = "",
        bucket: int | None = None,
        params: tuple[str, ...] = (),
    ) -> None:
        super().__init__(text)
        self.casualties = casualties
        self.rank = rank
        self.step = step
        self.phase = phase
        self.bucket = bucket
        self.params = params

    @property
    def ranks(self) -> tuple[int, ...]:
        """The lost ranks, in the process group of the wrapper."""
        return tuple(casualty.rank for casualty in self.casualties)

    @property
    def host(self) -> str:
        """The host of the first lost rank. Empty if no rank is lost."""
        return self.casualties[0].host if self.casualties else ""

    @property
    def cause(self) -> str:
        """The text of the exception that ended the first lost rank's script, or an empty text."""
        return self.casualties[0].cause if self.casualties else ""


class RankStalled(RankFailure):
    """Running ranks did not arrive in time, or communication took too long.

    The time limit is ``raise_s`` of :func:`ddpx.set_patience`, or the timeout of the process group.
    ``casualties`` are the late ranks. If no rank is late, ``casualties`` is empty.

    Example:
        >>> ddpx.set_patience(raise_s=0.3)
        >>> try:
        ...     model(inputs).sum().backward()  # rank 1 sleeps in its data loader
        ... except ddpx.RankStalled as failure:
        ...     print(failure.ranks)
        (1,)
    """


class RankMismatch(RankFailure):
    """Ranks made different collective calls. All ranks raise this error.

    No rank is lost, so ``casualties`` is empty.

    Example:
        >>> models = [model, ddpx.ReducerDDP(module)]
        >>> if dist.get_rank() == 1:
        ...     models.reverse()  # the mistake
        >>> try:
        ...     for wrapper in models:
        ...         wrapper(inputs).square().sum().backward()
        ... except ddpx.RankMismatch as failure:
        ...     print(failure.casualties)
        ()
    """


# The name under which it is caught is the one that a traceback shows.
for _error in (RankFailure, RankStalled, RankMismatch):
    _error.__module__ = "ddpx"

_KINDS = {_C.FailureKind.STALLED: RankStalled, _C.FailureKind.MISMATCH: RankMismatch}


def from_report(report: _C.RankReport) -> RankFailure:
    """What the core found, as the exception that says it."""
    kind = _KINDS.get(report.kind, RankFailure)
    return kind(
        report.text,
        tuple(
            Casualty(lost.rank, lost.host, lost.pid, lost.what, lost.cause, lost.last_seen)
            for lost in report.casualties
        ),
        report.rank,
        report.step,
        report.phase,
        report.bucket,
        tuple(report.params),
    )
