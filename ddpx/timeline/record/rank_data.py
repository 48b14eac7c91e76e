"""The recorded data of one rank. Ranks exchange this data, and files contain this data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ddpx import _C
from ddpx.planning import PlanReport
from ddpx.timeline.record.clocks import Reading


@dataclass(frozen=True)
class RawPlan:
    """A bucket plan that was in force during a recording.

    Attributes:
        first_step: The first step with this plan.
        buckets: For each bucket, the indices of its parameters and the number of bytes that an
            all-reduce without a communication hook sends. 0 for a sparse gradient.
    """

    first_step: int
    buckets: tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True, eq=False)  # comparing tensors does not give a bool
class RankData:
    """The recorded data of one rank.

    Attributes:
        name: The name of the recording, which is the same on all ranks.
        rank: The rank in the process group.
        world_size: The number of ranks in the process group.
        host: The host name.
        backend: The transport of buckets: ``"shm"``, or the backend of the process group.
        device: The device of the module.
        param_names: The names of the averaged parameters.
        param_bytes: The size of each gradient. 0 for a sparse gradient.
        readings: One or two readings of the clock.
        device_error_ns: The error bound of the device's times against the host's clock.
        num_lost: The number of events for which the ring buffer had no room.
        plans: The bucket plans, in order.
        events: Rows of time in ns on this rank's clock, step, kind and index, as in
            ``_C.Recording``.
        param_kinds: The dtype, the device and the delay of each gradient. A bucket contains one
            kind.
        clock: The identity of the clock, if this clock was not compared with the clock of rank 0.
        asked_steps: The number of steps to record. None: no limit was given.
        cores: The numbers of the CPU cores that the rank may use.
        num_threads: The number of threads that an operation of torch uses on the CPU.
        core_wait: The share of the recording in which the thread that started the recording was
            ready to run and had no core. None if the kernel does not report this time.
        plan_report: The result of the search of bucket plans. None without a search that ended.
        has_hook: Whether a communication hook or mixed precision communicates the buckets.
    """

    name: str
    rank: int
    world_size: int
    host: str
    backend: str
    device: str
    param_names: tuple[str, ...]
    param_bytes: tuple[int, ...]
    readings: tuple[Reading, ...]
    device_error_ns: int
    num_lost: int
    plans: tuple[RawPlan, ...]
    events: torch.Tensor
    param_kinds: tuple[str, ...]
    clock: str
    asked_steps: int | None
    cores: tuple[int, ...]
    num_threads: int
    core_wait: float | None
    plan_report: PlanReport | None
    has_hook: bool

    def to_json(self) -> dict[str, Any]:
        """Returns the data as values that JSON supports."""
        rest = asdict(replace(self, events=torch.empty(0, device="cpu")))
        return {**rest, "events": self.events.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankData:
        """Reverses :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: ``to_json`` did not make the values.
        """
        values = dict(values)
        for key in ("param_names", "param_bytes", "param_kinds", "cores"):
            values[key] = tuple(values[key])
        events = torch.tensor(values["events"], dtype=torch.int64, device="cpu")
        values["events"] = events.view(-1, 4)
        values["readings"] = tuple(Reading(**reading) for reading in values["readings"])
        values["plans"] = tuple(
            RawPlan(
                plan["first_step"],
                tuple((tuple(params), num_bytes) for params, num_bytes in plan["buckets"]),
            )
            for plan in values["plans"]
        )
        if values["plan_report"] is not None:
            values["plan_report"] = PlanReport.from_json(values["plan_report"])
        _check(values)
        return cls(**values)


def _check(values: dict[str, Any]) -> None:
    """Raises ValueError if steps cannot be made of the values."""
    if not isinstance(values["rank"], int) or not values["readings"] or not values["plans"]:
        raise ValueError("a rank lacks its number, the readings of its clock, or its bucket plan")
    unknown = set(values["events"][:, 2].tolist()) - set(
        map(int, _C.EventKind.__members__.values())
    )
    if unknown:
        raise ValueError(f"this ddpx does not know events of kind {min(unknown)}")
