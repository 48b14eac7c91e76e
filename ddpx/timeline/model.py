"""The data of a timeline, as immutable values.

All times are nanoseconds on the clock of rank 0, counted from the start of the recording.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpx.planning import PlanReport


@dataclass(frozen=True)
class Interval:
    """A span of time.

    Attributes:
        begin: The start, in ns.
        end: The end, in ns. Not before ``begin``.
    """

    begin: int
    end: int

    @property
    def ns(self) -> int:
        """The duration, in ns."""
        return self.end - self.begin


@dataclass(frozen=True)
class BucketLayout:
    """The contents of a bucket in a step.

    Attributes:
        params: Indices into ``Recording.param_names``, in the order of the flat buffer.
        num_bytes: The bytes that an all-reduce of the bucket sends without a communication hook. 0
            for a sparse gradient, whose size changes from step to step.
    """

    params: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Arrival:
    """The arrival of a gradient.

    Attributes:
        param: An index into ``Recording.param_names``.
        at: The time in ns. If the gradient comes in parts, the time of the last part.
    """

    param: int
    at: int


@dataclass(frozen=True)
class BucketTimes:
    """The times of one bucket in one step on one rank, in ns.

    Attributes:
        ready: The last gradient is packed.
        launched: The all-reduce starts. Buckets are launched in plan order.
        completed: The all-reduce ends.
        wait: The wait at the end of the step for this bucket. For the first bucket that needs the
            ranks' agreement on used parameters, the wait includes this agreement.
        written_back: The gradients are in ``param.grad``.
    """

    ready: int
    launched: int
    completed: int
    wait: Interval
    written_back: int


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of the reducer.

    Attributes:
        phase: ``"collecting"``, ``"finalizing"``, ``"rebuilding"`` or ``"failed"``. With manual
            finalization also ``"ready"``, until ``finalize_backward()``, or ``"finalized"``, for
            the rest of a backward.
        span: The time of the phase.
    """

    phase: str
    span: Interval


@dataclass(frozen=True)
class RankStep:
    """A synchronized step on one rank.

    Attributes:
        forwards: The forwards of the wrapper. Several if gradients are accumulated.
        backward: The time from the module's outputs to the end of backward, when only
            communication is left. If backward reaches no output, the first gradient is the start.
        end: The end of the step, when ``backward()`` returns. With manual finalization, when
            ``finalize_backward()`` returns.
        arrivals: The gradients, in order of time.
        buckets: The buckets, by bucket index. None for a bucket that is not communicated.
        phases: The phases of the reducer, in order, without ``"idle"``.
        agreement: The communication after the last bucket: ranks agree on skipped buckets, and on
            whether gradients are finite. Of length 0 if there is no such communication.
        local_backwards: The backwards in ``no_sync()`` since the last step, in order, if their
            forwards went through the wrapper.
    """

    forwards: tuple[Interval, ...]
    backward: Interval
    end: int
    arrivals: tuple[Arrival, ...]
    buckets: tuple[BucketTimes | None, ...]
    phases: tuple[PhaseSpan, ...]
    agreement: Interval = Interval(0, 0)  # empty without such a communication
    local_backwards: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step on all recorded ranks.

    Attributes:
        number: The number of synchronized steps between wrapping and this step.
        layout: The buckets, which are the same on all ranks.
        ranks: The step of each rank, by rank.
    """

    number: int
    layout: tuple[BucketLayout, ...]
    ranks: dict[int, RankStep]


@dataclass(frozen=True)
class Clock:
    """The calibration of a rank's clock.

    Attributes:
        offset_ns: The difference between the clock of rank 0 and the rank's clock at the start.
        error_ns: The error bound of the rank's times. The bound is half of the shortest round trip
            to rank 0. Without a second reading at the end, the bound includes a drift of 0.1 ms
            for each second. On a device, the bound includes the error of the device's clock.
    """

    offset_ns: float
    error_ns: float


@dataclass(frozen=True)
class Recording:
    """All data of a timeline.

    Attributes:
        param_names: The names of parameters, from ``named_parameters()`` of the wrapped module.
        steps: The complete steps, in order.
        clocks: The clock of each recorded rank, by rank.
        hosts: The host name of each recorded rank, by rank.
        backend: The transport of buckets: ``"shm"``, or the backend of the process group.
        device: The device of the module. On other devices than ``"cpu"``, times are those of the
            device. The times of phases are those of the host.
        world_size: The number of ranks in the process group. Some may not be recorded.
        lost_events: The number of older events for which a rank's ring buffer had no room, by
            rank.
        param_bytes: The size of each parameter's gradient in the dtype of the parameter, to which
            bucket caps apply. 0 for a sparse gradient.
        param_kinds: The dtype, the device and the delay of each parameter's gradient. A bucket
            contains one kind.
        asked_steps: The number of steps that were to be recorded. None: no limit was given.
        cores: The CPU cores that each rank may use, by rank.
        num_threads: The number of threads that an operation uses on the CPU, by rank.
        core_waits: The share of the recording in which a rank was ready to run and had no core, by
            rank. A rank is left out if its kernel does not report this time.
        plan_report: The result of the search of bucket plans, if a search ended before the end of
            the recording; see :func:`ddpx.plan_report`.
        has_hook: Whether a communication hook or mixed precision communicates the buckets.
    """

    param_names: tuple[str, ...]
    steps: tuple[Step, ...]
    clocks: dict[int, Clock]
    hosts: dict[int, str]
    backend: str
    device: str
    world_size: int
    lost_events: dict[int, int]
    param_bytes: tuple[int, ...] = ()
    param_kinds: tuple[str, ...] = ()
    asked_steps: int | None = None
    cores: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_threads: dict[int, int] = field(default_factory=dict)
    core_waits: dict[int, float] = field(default_factory=dict)
    plan_report: PlanReport | None = None
    has_hook: bool = False
