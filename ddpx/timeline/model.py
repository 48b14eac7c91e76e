"""What a timeline holds, as typed, immutable values.

All times are nanoseconds on one clock, rank 0's, counted from the start of the recording. Derived
figures (what overlapped, who was waited for) are in ``figures.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Attributes:
    begin, end: ns; ``begin <= end``.
    """

    begin: int
    end: int

    @property
    def ns(self) -> int:
        """Its length."""
        return self.end - self.begin


@dataclass(frozen=True)
class BucketLayout:
    """A bucket as it lies in the plan of some steps.

    Attributes:
        params: indices into ``Recording.param_names``, in the order in which they lie in it.
        num_bytes: of the flat buffer; 0 for a sparse one, whose size differs from step to step.
    """

    params: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Arrival:
    """A gradient was accumulated.

    Attributes:
        param: index into ``Recording.param_names``.
        at: ns. If a gradient came in parts, of the last part.
    """

    param: int
    at: int


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one step on one rank; all in ns.

    Attributes:
        ready: its last gradient is packed.
        launched: its all-reduce was started: buckets leave in plan order.
        completed: its all-reduce has ended.
        wait: from when the end of backward began to wait for it, to when it went on; with the wait
        for what ranks agree about used params, if it was the first bucket that had to know.
        written_back: its gradients are where ``param.grad`` finds them.
    """

    ready: int
    launched: int
    completed: int
    wait: Interval
    written_back: int


@dataclass(frozen=True)
class PhaseSpan:
    """Attributes:
    phase: as in ``csrc/phase.h``: "collecting", "draining", "rebuilding", "failed".
    """

    phase: str
    span: Interval


@dataclass(frozen=True)
class RankStep:
    """A synchronised step on one rank.

    Attributes:
        forwards: of the wrapper; more than one if gradients were accumulated.
        backward: from when backward reached the module's outputs (or its first gradient, if it
            reached no output) to its end, when nothing is left but communication.
    local_backwards: those within ``no_sync()`` since the last step, in order; of forwards that went
        through the wrapper.
        end: the step is over, and ``backward()`` returns.
        arrivals: in order of time.
        buckets: by bucket index; None for one that was not communicated.
        phases: the reducer's, in order, without "idle".
    agreement: after the last bucket, the time for what ranks have to agree on: skipped buckets
        that a rank used after all, whether gradients are finite.
    """

    forwards: tuple[Interval, ...]
    backward: Interval
    end: int
    arrivals: tuple[Arrival, ...]
    buckets: tuple[BucketTimes | None, ...]
    phases: tuple[PhaseSpan, ...]
    agreement: Interval = Interval(0, 0)  # of no length: nothing to agree on
    local_backwards: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class Step:
    """The same step on all ranks that recorded it.

    Attributes:
        number: counted by the reducer, from 0, since the model was wrapped.
        layout: the buckets, the same on all ranks.
        ranks: by rank.
    """

    number: int
    layout: tuple[BucketLayout, ...]
    ranks: dict[int, RankStep]


@dataclass(frozen=True)
class Clock:
    """How well a rank's clock is known.

    Attributes:
        offset_ns: what was added to the rank's times to get rank 0's, at the start.
        error_ns: how far its times may be off: half the quickest round trip to rank 0. If the clock
            was not read again at the end, also 0.1 ms for each second since, by which clocks of
            two machines may drift apart; on a device, how well its clock is known to the host.
    """

    offset_ns: float
    error_ns: float


@dataclass(frozen=True)
class Recording:
    """Everything that was recorded.

    Attributes:
        param_names: as in ``named_parameters()`` of the wrapped module.
        steps: complete ones, in order.
        clocks: by rank; of those that were recorded.
        hosts: by rank, names.
        backend, device: of the process group; of the module. On a device other than "cpu", times
        are those at which the device came by, but for phases, which are the host's.
        world_size: ranks in the process group, recorded or not.
        lost_events: by rank, how many older events the ring had no room for.
    param_bytes: of each param's gradient; 0 for a sparse one.
    param_kinds: of each param's gradient, what a bucket cannot mix: dtype, device, whether it is
        delayed. Empty in files of older versions.
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
