"""Counts what a step launches on a device, and measures how communication and computation
overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Span = tuple[int, int]  # begin and end, in ns


@dataclass(frozen=True)
class Event:
    """One kernel, copy or fill on a device. Without a device, one operator."""

    name: str
    span: Span
    num_bytes: int

    @property
    def is_copy(self) -> bool:
        return self.name.startswith("Memcpy")

    @property
    def is_fill(self) -> bool:
        return self.name.startswith("Memset")

    @property
    def is_communication(self) -> bool:
        """Whether it is a kernel of NCCL, or an operator of gloo. gloo has no kernels: it copies
        to the host and back."""
        to_or_from_host = self.is_copy and ("HtoD" in self.name or "DtoH" in self.name)
        return to_or_from_host or "nccl" in self.name.lower() or self.name.startswith("gloo:")


def profile_steps(step: Callable[[], object], num_steps: int, device: str) -> list[Event]:
    """Runs ``step`` several times under torch's profiler, which reads the records of a GPU
    (CUPTI)."""

    def steps() -> None:
        for _ in range(num_steps):
            step()

    found = profile_events(steps, device)
    return found.host if device == "cpu" else found.device


class Events(NamedTuple):
    """Events on the clock of the profiler.

    Attributes:
        host: Operators, calls of the driver, and functions of C++.
        ranges: Ranges of ``record_function()`` in Python, and calls of a process group.
        device: Kernels, copies and fills on the GPU.
    """

    host: list[Event]
    ranges: list[Event]
    device: list[Event]


def profile_events(run: Callable[[], object], device: str) -> Events:
    """Runs a function under torch's profiler."""
    on_gpu = [ProfilerActivity.CUDA] if device != "cpu" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiler:
        run()
    found: Any = profiler.profiler.kineto_results.events()
    events = Events([], [], [])
    for event in found:
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        made = Event(event.name(), span, event.nbytes())
        if event.device_type() == DeviceType.CPU:
            (events.ranges if event.is_user_annotation() else events.host).append(made)
        elif event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            events.device.append(made)
    return events


def count(events: Sequence[Event], num_steps: int) -> dict[str, float]:
    """Kernels, copies and bytes copied, per step.

    The records do not have the bytes that kernels move.
    """
    copies = [event for event in events if event.is_copy]
    fills = [event for event in events if event.is_fill]
    return {
        "kernels": (len(events) - len(copies) - len(fills)) / num_steps,
        "copies": len(copies) / num_steps,
        "fills": len(fills) / num_steps,
        "copied_bytes": sum(max(event.num_bytes, 0) for event in copies) / num_steps,
        "communication": sum(event.is_communication for event in events) / num_steps,
    }


def merge(spans: Iterable[Span]) -> list[Span]:
    """The same instants as ordered spans that neither touch nor overlap."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in merge(spans))


def common_length(some: Iterable[Span], others: Iterable[Span]) -> int:
    """The time in ns that is in both."""
    some, others = merge(some), merge(others)
    return length(some) + length(others) - length([*some, *others])


def overlap(events: Sequence[Event]) -> dict[str, float | None]:
    """The time of communication, and the share of it that overlaps with kernels that compute.

    ``share`` is None if nothing was sent: NCCL launches no kernel for a group of one rank.
    """
    sent = [event.span for event in events if event.is_communication]
    computed = [
        event.span
        for event in events
        if not (event.is_communication or event.is_copy or event.is_fill)
    ]
    total = length(sent)
    return {
        "communication_ms": total / 1e6,
        "computation_ms": length(computed) / 1e6,
        "share": common_length(sent, computed) / total if total else None,
    }
