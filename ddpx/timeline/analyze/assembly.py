"""Assembles steps from the events of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ddpx import _C
from ddpx.timeline.model import (
    Arrival,
    BucketLayout,
    BucketTimes,
    Clock,
    Interval,
    PhaseSpan,
    RankStep,
    Recording,
    Step,
)
from ddpx.timeline.record.clocks import error_of, to_rank_0
from ddpx.timeline.record.rank_data import RankData

_KINDS = {int(kind): kind.name for kind in _C.EventKind.__members__.values()}
_ENDS = ("BACKWARD_END", "AGREE_BEGIN", "AGREE_END", "STEP_END")
_PHASES = {int(phase): phase.name.lower() for phase in _C.Phase.__members__.values()}


@dataclass(frozen=True)
class _Event:
    kind: str
    index: int
    at: int


def assemble(ranks: Sequence[RankData]) -> Recording:
    """Returns the recording. Steps that a rank recorded only in part are left out."""
    origin = origin_ns(ranks)
    steps: dict[int, dict[int, RankStep]] = defaultdict(dict)
    layouts: dict[int, tuple[BucketLayout, ...]] = {}
    for data in ranks:
        for number, events in _by_step(data, origin).items():
            layout = _layout(data, number)
            rank_step = _rank_step(events, len(layout))
            if rank_step is not None:
                steps[number][data.rank] = rank_step
                layouts[number] = layout
    first = ranks[0]
    return Recording(
        param_names=first.param_names,
        param_bytes=first.param_bytes,
        param_kinds=first.param_kinds,
        steps=tuple(Step(number, layouts[number], steps[number]) for number in sorted(steps)),
        clocks={data.rank: _clock(data) for data in ranks},
        hosts={data.rank: data.host for data in ranks},
        backend=first.backend,
        device=first.device,
        world_size=first.world_size,
        lost_events={data.rank: data.num_lost for data in ranks},
        asked_steps=first.asked_steps,
        cores={data.rank: data.cores for data in ranks},
        num_threads={data.rank: data.num_threads for data in ranks},
        core_waits={d.rank: d.core_wait for d in ranks if d.core_wait is not None},
        plan_report=next((d.plan_report for d in ranks if d.plan_report is not None), None),
        has_hook=first.has_hook,
    )


def origin_ns(ranks: Sequence[RankData]) -> int:
    """The time from which a recording counts, on the clock of rank 0."""
    return round(min((_start(data) for data in ranks), default=0))


def _start(data: RankData) -> float:
    return to_rank_0(data.readings[0].at_ns, data.readings)


def _clock(data: RankData) -> Clock:
    until_ns = int(data.events[:, 0].max()) if len(data.events) else 0
    error_ns = error_of(until_ns, data.readings) + data.device_error_ns
    return Clock(data.readings[0].offset_ns, error_ns)


def _layout(data: RankData, step: int) -> tuple[BucketLayout, ...]:
    plan = [plan for plan in data.plans if plan.first_step <= step][-1]
    return tuple(BucketLayout(params, num_bytes) for params, num_bytes in plan.buckets)


def _by_step(data: RankData, origin: int) -> dict[int, list[_Event]]:
    steps: dict[int, list[_Event]] = defaultdict(list)
    for time_ns, step, kind, index in data.events.tolist():
        at = round(to_rank_0(time_ns, data.readings)) - origin
        steps[step].append(_Event(_KINDS[kind], index, at))
    if data.num_lost and steps:
        del steps[min(steps)]  # the first events of this step may be lost
    return steps


@dataclass
class _Attempt:
    """The events since the last start of a backward in a step. Earlier backwards were aborted."""

    backward_begin: int
    ends: dict[str, int] = field(default_factory=dict)  # by kind, as of _ENDS
    arrivals: dict[int, int] = field(default_factory=dict)
    buckets: dict[int, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))


def _rank_step(events: Sequence[_Event], num_buckets: int) -> RankStep | None:
    """Returns the step of one rank. None if the step is not complete."""
    forwards, local_backwards, attempt = _forwards(events), _local_backwards(events), None
    outputs_reached: list[int] = []
    for event in events:
        if event.kind == "FORWARD_END":
            outputs_reached.clear()
        elif event.kind == "BACKWARD_BEGIN":
            outputs_reached.append(event.at)
        elif event.kind == "STEP_BEGIN":
            attempt = _Attempt(min(outputs_reached, default=event.at))
        elif event.kind == "LOCAL_BACKWARD_END":
            outputs_reached.clear()
        elif attempt is None:
            continue
        elif event.kind in _ENDS:
            attempt.ends[event.kind] = event.at
        elif event.kind == "GRAD_ARRIVED":
            attempt.arrivals[event.index] = event.at
        elif event.kind != "PHASE":
            attempt.buckets[event.index].setdefault(event.kind, event.at)
    if attempt is None or "STEP_END" not in attempt.ends:
        return None
    ends, end = attempt.ends, attempt.ends["STEP_END"]
    arrivals = sorted((at, param) for param, at in attempt.arrivals.items())
    return RankStep(
        forwards=forwards,
        backward=Interval(attempt.backward_begin, ends.get("BACKWARD_END", -1)),
        end=end,
        arrivals=tuple(Arrival(param, at) for at, param in arrivals),
        buckets=tuple(_bucket(attempt.buckets.get(index, {})) for index in range(num_buckets)),
        phases=_phases(events),
        # Empty without a communication after the last bucket.
        agreement=Interval(ends.get("AGREE_BEGIN", end), ends.get("AGREE_END", end)),
        local_backwards=local_backwards,
    )


def _forwards(events: Iterable[_Event]) -> tuple[Interval, ...]:
    forwards = []
    begin = None
    for event in events:
        if event.kind == "FORWARD_BEGIN":
            begin = event.at
        elif event.kind == "FORWARD_END" and begin is not None:
            forwards.append(Interval(begin, event.at))
            begin = None
        elif event.kind == "PHASE" and _PHASES[event.index] == "failed":
            forwards.clear()
    return tuple(forwards)


def _local_backwards(events: Iterable[_Event]) -> tuple[Interval, ...]:
    backwards = []
    begin = None
    for event in events:
        if event.kind == "BACKWARD_BEGIN" and begin is None:
            begin = event.at
        elif event.kind == "LOCAL_BACKWARD_END" and begin is not None:
            backwards.append(Interval(begin, event.at))
            begin = None
        elif event.kind == "PHASE" and _PHASES[event.index] == "failed":
            backwards.clear()
            begin = None
        elif event.kind in ("FORWARD_END", "STEP_BEGIN"):  # a further backward, or an aborted one
            begin = None
    return tuple(backwards)


def _bucket(at: dict[str, int]) -> BucketTimes | None:
    if not {"BUCKET_READY", "LAUNCHED", "WAIT_BEGIN", "WAIT_END", "WRITTEN_BACK"} <= at.keys():
        return None
    # The thread that records the end may run later than the thread that waits for the end.
    completed = min(at.get("COMPLETED", at["WAIT_END"]), at["WAIT_END"])
    return BucketTimes(
        ready=at["BUCKET_READY"],
        launched=at["LAUNCHED"],
        completed=max(completed, at["LAUNCHED"]),
        wait=Interval(at["WAIT_BEGIN"], at["WAIT_END"]),
        written_back=at["WRITTEN_BACK"],
    )


def _phases(events: Iterable[_Event]) -> tuple[PhaseSpan, ...]:
    spans = []
    current: tuple[str, int] | None = None
    for event in events:
        if event.kind != "PHASE":
            continue
        if current is not None:
            spans.append(PhaseSpan(current[0], Interval(current[1], event.at)))
        phase = _PHASES[event.index]
        current = None if phase == "idle" else (phase, event.at)
    return tuple(spans)
