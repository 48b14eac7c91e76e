"""Compares recorded steps with the kernels that torch's profiler saw in the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gpu_profile import Event, Events, Span, common_length, length
from torch.profiler import record_function

from ddpx import _C

_CLOCK = "ddpx::clock"
_READINGS = 20
# The goal: the two times of a bucket differ by less than the larger one of these.
_SHARE, _LEAST_NS = 0.10, 50_000
Figures = dict[str, Any]


# ---- clocks --------------------------------------------------------------------------------------


class ClockReadings:
    """Relates the profiler's clock to the recording's clock, which is ``steady_now()``.

    The profiler records the start and the end of a range on the host. The recording's clock is read
    directly before and after the range. No kernel is used, so the comparison of kernels stays
    independent.
    """

    def __init__(self) -> None:
        self._around: list[Span] = []

    def read(self) -> None:
        """Makes several readings. To be called while the profiler runs."""
        for _ in range(_READINGS):
            before = _C.steady_now()
            with record_function(_CLOCK):
                pass
            self._around.append((before, _C.steady_now()))

    def offset(self, ranges: Sequence[Event]) -> tuple[float, float]:
        """The time to add to a time of the profiler, and the error bound of this time, in ns.

        Each range is between its two readings, so it bounds the offset from both sides.

        Raises:
            RuntimeError: The profiler did not record all readings.
        """
        inside = sorted(event.span for event in ranges if event.name == _CLOCK)
        if not inside or len(inside) != len(self._around):
            raise RuntimeError(
                f"the clock was read {len(self._around)} times, but the profiler has "
                f"{len(inside)} ranges {_CLOCK!r}"
            )
        pairs = list(zip(self._around, inside, strict=True))
        least = max(before - begin for (before, _), (begin, _) in pairs)
        most = min(after - end for (_, after), (_, end) in pairs)
        return (least + most) / 2, abs(most - least) / 2


# ---- what the profiler saw -----------------------------------------------------------------------


@dataclass(frozen=True)
class Profiled:
    """The events of one rank, on the recording's clock in ns.

    Attributes:
        reductions: The kernels of all-reduces. On CPU, gloo's operators.
        computation: The other kernels, copies and fills. Empty on CPU.
        waits: The reducer's waits on the host.
        clock_error_ns: The error bound of the offset between the clocks.
    """

    reductions: list[Span]
    computation: list[Span]
    waits: list[Span]
    clock_error_ns: float


def read_events(events: Events, readings: ClockReadings) -> Profiled:
    """Converts the profiler's events to the recording's clock."""
    offset_ns, error_ns = readings.offset(events.ranges)

    def spans(found: Sequence[Event], wanted: Callable[[Event], bool]) -> list[Span]:
        shift = round(offset_ns)
        return sorted((e.span[0] + shift, e.span[1] + shift) for e in found if wanted(e))

    return Profiled(
        reductions=spans([*events.device, *events.ranges], _is_reduction),
        computation=spans(events.device, lambda event: "nccl" not in event.name.lower()),
        waits=spans(events.host, lambda event: event.name == "ddpx::wait"),
        clock_error_ns=error_ns,
    )


def _is_reduction(event: Event) -> bool:
    # On a GPU, the range "nccl:all_reduce" is the launch of a kernel.
    return ("nccl" in event.name and "AllReduce" in event.name) or event.name == "gloo:all_reduce"


# ---- the comparison ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step of one rank, on the recording's clock in ns.

    Attributes:
        number: The number of the step.
        reductions: By bucket that was sent, in the order of launches: the recorded reduction.
        num_bytes: The sizes of these buckets.
        exposed_ns: The recorded exposed communication.
    """

    number: int
    reductions: list[Span]
    num_bytes: list[int]
    exposed_ns: int


def compare(steps: Sequence[RecordedStep], profiled: Profiled, on_device: bool) -> Figures:
    """Compares each reduction with the kernel at the same place in the order, and exposed times.

    Raises:
        RuntimeError: The profiler has another number of all-reduces than the recording.
    """
    wanted = sum(len(step.reductions) for step in steps)
    if wanted != len(profiled.reductions):
        raise RuntimeError(
            f"{wanted} reductions were recorded in {len(steps)} steps, but the profiler has "
            f"{len(profiled.reductions)} all-reduces"
        )
    buckets: list[Figures] = []
    exposed: list[Figures] = []
    kernels = iter(profiled.reductions)
    for step in steps:
        of_step = [next(kernels) for _ in step.reductions]
        rows = zip(step.reductions, of_step, step.num_bytes, strict=True)
        buckets += [
            {"step": step.number, "place": place, "bytes": num_bytes, **_difference(ours, kernel)}
            for place, (ours, kernel, num_bytes) in enumerate(rows)
        ]
        if on_device:
            seen_ns = exposed_on_device(of_step, profiled.computation)
        else:
            seen_ns = common_length(of_step, profiled.waits)
        exposed.append(
            {
                "step": step.number,
                "recorded_ms": step.exposed_ns / 1e6,
                "profiled_ms": seen_ns / 1e6,
                "agrees": abs(step.exposed_ns - seen_ns) <= _SHARE * seen_ns,
            }
        )
    return {
        "clock_error_us": profiled.clock_error_ns / 1e3,
        "buckets": buckets,
        "exposed": exposed,
        **_summary(buckets, exposed),
    }


def _difference(ours: Span, kernel: Span) -> Figures:
    """The time that is in one of the two spans and not in the other, and its parts."""
    apart_ns = length([ours]) + length([kernel]) - 2 * common_length([ours], [kernel])
    kernel_ns = kernel[1] - kernel[0]
    return {
        "recorded_ms": (ours[1] - ours[0]) / 1e6,
        "kernel_ms": kernel_ns / 1e6,
        "begin_us": (ours[0] - kernel[0]) / 1e3,
        "end_us": (ours[1] - kernel[1]) / 1e3,
        "apart_us": apart_ns / 1e3,
        "agrees": apart_ns <= max(_SHARE * kernel_ns, _LEAST_NS),
    }


def exposed_on_device(reductions: Sequence[Span], computation: Sequence[Span]) -> int:
    """The time of the kernels of all-reduces after the last kernel of backward.

    The stream of backward waits for the last all-reduce, so no kernel that follows the step begins
    before its end. With gradients that are views of buckets, none lies between two waits either.
    """
    end = max(end for _, end in reductions)
    computed = max((span[1] for span in computation if span[0] < end), default=0)
    return length((max(begin, computed), end) for begin, end in reductions if end > computed)


def _summary(buckets: Sequence[Figures], exposed: Sequence[Figures]) -> Figures:
    def middle(rows: Sequence[Figures], key: str) -> float:
        return median(abs(row[key]) for row in rows)

    return {
        "buckets_agree": sum(row["agrees"] for row in buckets) / len(buckets),
        "exposed_agree": sum(row["agrees"] for row in exposed) / len(exposed),
        "median_begin_us": middle(buckets, "begin_us"),
        "median_end_us": middle(buckets, "end_us"),
        "median_kernel_ms": middle(buckets, "kernel_ms"),
        "median_recorded_exposed_ms": middle(exposed, "recorded_ms"),
        "median_profiled_exposed_ms": middle(exposed, "profiled_ms"),
    }
