"""A recording as Chrome trace events.

The format is Google's "Trace Event Format":
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. "X" is a slice with
a duration, "i" is an instant, and "M" is metadata. ``ts`` and ``dur`` are in µs. A process is a
rank, and a thread is one kind of work. Slices of one thread must not overlap in part, because
Perfetto would show them wrongly (https://perfetto.dev/docs/faq).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ddpx.timeline.analyze.extent import rank_extent, step_extent
from ddpx.timeline.analyze.figures import Holdup, Holdups, holdups, launched_buckets, step_figures
from ddpx.timeline.model import BucketTimes, Interval, Recording, Step

_US = 1e3  # in ns
_MS = 1e6


@dataclass(frozen=True)
class _Slice:
    name: str
    span: Interval
    args: dict[str, Any] = field(default_factory=dict)


def to_events(recording: Recording) -> list[dict[str, Any]]:
    """Returns the events of a recording.

    Each rank has the tracks "step", "forward/backward", "reducer phase", "communication" and
    "wait". There is a "communication" track for each bucket that is in flight at the same time.
    Instants in "forward/backward" are arrivals of gradients. Times in ``args`` are in ms since the
    first rank began the step.
    """
    events: list[dict[str, Any]] = []
    # Differs from all ranks. On Linux, a thread with the number of its process is the main thread.
    tids = count(recording.world_size)
    found = holdups(recording.steps)
    for rank in sorted(recording.hosts):
        steps = [step for step in recording.steps if rank in step.ranks]
        events.append(_metadata("process_name", rank, 0, f"rank {rank} ({recording.hosts[rank]})"))
        events.append(_metadata("process_sort_index", rank, 0, rank))
        tracks: list[tuple[str, Iterator[_Slice]]] = [
            ("step", _steps(steps, rank)),
            ("forward/backward", _compute(steps, rank)),
            ("reducer phase", _phases(steps, rank)),
            ("communication", _communication(recording, steps, rank, found)),
            ("wait", _waits(steps, rank)),
        ]
        for name, slices in tracks:
            for number, lane in enumerate(_lanes(slices)):
                tid = next(tids)
                events.append(_metadata("thread_name", rank, tid, name))
                events.append(_metadata("thread_sort_index", rank, tid, tid))
                events += [_slice_event(rank, tid, name, each) for each in lane]
                if name == "forward/backward" and number == 0:
                    events += _arrivals(recording, steps, rank, tid)
    return events


def _steps(steps: Iterable[Step], rank: int) -> Iterator[_Slice]:
    for step in steps:
        figures = step_figures(step.ranks[rank])
        args = {f"{name}_ms": ns / _MS for name, ns in vars(figures).items()}
        yield _Slice(f"step {step.number}", rank_extent(step.ranks[rank]), args)


def _compute(steps: Iterable[Step], rank: int) -> Iterator[_Slice]:
    for step in steps:
        for forward in step.ranks[rank].forwards:
            yield _Slice("forward", forward)
        for backward in step.ranks[rank].local_backwards:
            yield _Slice("backward in no_sync()", backward)
        yield _Slice("backward", step.ranks[rank].backward)


def _phases(steps: Iterable[Step], rank: int) -> Iterator[_Slice]:
    for step in steps:
        for phase in step.ranks[rank].phases:
            yield _Slice(phase.phase, phase.span)


def _communication(
    recording: Recording,
    steps: Iterable[Step],
    rank: int,
    found: Holdups,
) -> Iterator[_Slice]:
    for step in steps:
        for index, bucket in launched_buckets(step.ranks[rank]).items():
            yield _Slice(
                f"bucket {index}",
                Interval(bucket.launched, bucket.completed),
                _bucket_args(recording, step, index, bucket, found.get((step.number, index))),
            )


def _bucket_args(
    recording: Recording, step: Step, index: int, bucket: BucketTimes, found: Holdup | None
) -> dict[str, Any]:
    begin = step_extent(step).begin
    layout = step.layout[index]
    args: dict[str, Any] = {
        "index": index,
        "bytes": layout.num_bytes,
        "params": [recording.param_names[param] for param in layout.params],
        "ready_ms": (bucket.ready - begin) / _MS,
        "launched_ms": (bucket.launched - begin) / _MS,
        "completed_ms": (bucket.completed - begin) / _MS,
        "written_back_ms": (bucket.written_back - begin) / _MS,
    }
    if found is not None:
        args["waited_for_rank"] = found.rank
        args["waited_for_param"] = (
            None if found.param is None else recording.param_names[found.param]
        )
        args["waited_ms"] = found.waited_ns / _MS
    return args


def _waits(steps: Iterable[Step], rank: int) -> Iterator[_Slice]:
    for step in steps:
        for index, bucket in launched_buckets(step.ranks[rank]).items():
            yield _Slice(f"wait for bucket {index}", bucket.wait)
            back = Interval(bucket.wait.end, bucket.written_back)
            yield _Slice(f"write bucket {index} back", back)


def _lanes(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """Assigns each interval to the first lane that is free."""
    lanes: list[list[_Slice]] = [[]]
    for each in sorted(slices, key=lambda s: (s.span.begin, s.span.end)):
        for lane in lanes:
            if not lane or lane[-1].span.end <= each.span.begin:
                lane.append(each)
                break
        else:
            lanes.append([each])
    return lanes


def _slice_event(rank: int, tid: int, category: str, each: _Slice) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": each.name,
        "cat": category,
        "pid": rank,
        "tid": tid,
        "ts": each.span.begin / _US,
        "dur": each.span.ns / _US,
        "args": each.args,
    }


def _arrivals(
    recording: Recording, steps: Iterable[Step], rank: int, tid: int
) -> Iterator[dict[str, Any]]:
    for step in steps:
        for arrival in step.ranks[rank].arrivals:
            yield {
                "ph": "i",
                "s": "t",  # shown in this thread only
                "name": "gradient",
                "cat": "gradient",
                "pid": rank,
                "tid": tid,
                "ts": arrival.at / _US,
                "args": {"param": recording.param_names[arrival.param]},
            }


def _metadata(name: str, rank: int, tid: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if name.endswith("sort_index") else "name"
    return {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": {key: value}}
