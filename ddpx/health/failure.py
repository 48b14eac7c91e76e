"""The errors that say that a group has lost ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ddpx import _C


@dataclass(frozen=True)
class Casualty:
    """A rank that a group cannot go on without.

    Attributes:
        rank: in the process group of the wrapper; the error's text says which of the job it is.
        host: where it ran; "unknown" if it had not wrapped its model.
        pid: its process; 0 if unknown.
        what: what became of it: "was killed by SIGKILL".
        cause: the text of the exception that ended its script; empty if it left none.
        last_seen: the step, phase and bucket at which it was; empty if nobody knows.
    """

    rank: int
    host: str
    pid: int
    what: str
    cause: str
    last_seen: str


class RankFailure(dist.DistBackendError):
    """Ranks have died, or left while others wait for them; every rank that lives raises it.

    A ``torch.distributed.DistBackendError``, and so a ``RuntimeError``: code that catches those
    goes on to work. The gradients of the step are not averaged.

    Attributes:
        casualties: what became of whom.
        rank: the rank that raises this.
        step: the synchronised step that it was in, counted from 0; -1 before its first one.
        phase: what it was doing, in words.
        bucket: the bucket that it was waiting for; None if for none.
        params: the parameters of that bucket.
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
        """Those that are lost."""
        return tuple(casualty.rank for casualty in self.casualties)

    @property
    def host(self) -> str:
        """Of the first one that is lost."""
        return self.casualties[0].host if self.casualties else ""

    @property
    def cause(self) -> str:
        """The text of the exception that ended the first one's script; empty if it left none."""
        return self.casualties[0].cause if self.casualties else ""


class RankStalled(RankFailure):
    """Ranks that live have not come for longer than :func:`ddpx.set_patience`, or the group's own
    timeout, allows; or communication takes that long though no rank is missing: no casualties then.
    """


class RankMismatch(RankFailure):
    """Ranks made different collective calls; all raise it. Nobody is lost: no casualties."""


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
