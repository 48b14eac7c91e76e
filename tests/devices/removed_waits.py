"""Each stream wait and record of the reducer, and a test that notices when it is left out.

The late device leaves out those that are made within a C++ function; the reducer is the one that
users run. ``scripts/device_tables.py`` writes the table of docs/devices.md from this list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from device_ranks import Device
from test_streams import (
    accumulated_on_several_streams,
    backward_on_a_side_stream,
    gradients_on_several_streams,
)


@dataclass(frozen=True)
class Removed:
    function: str  # a part of its C++ name
    what: str  # that it makes wait, or keeps
    scenario: Callable[..., None]
    arguments: tuple[str, ...]


REMOVED = (
    Removed(
        "ddpx::StreamJoin::join",
        "a launch, for gradients that were packed on other streams",
        gradients_on_several_streams,
        ("default", "one bucket"),
    ),
    Removed(
        "ddpx::StreamJoin::join",
        "packing a whole bucket, for gradients that arrived on other streams",
        accumulated_on_several_streams,
        ("batched", "one bucket"),
    ),
    Removed(
        "ddpx::Bucket::wait",
        "the step's end, for the all-reduce of a bucket",
        backward_on_a_side_stream,
        ("default", "several buckets"),
    ),
    Removed(
        "ddpx::pack(",
        "the memory of a gradient that gives way to a view of its bucket",
        gradients_on_several_streams,
        ("view", "one bucket"),
    ),
    Removed(
        "ddpx::pack_together",
        "the same, where whole buckets are packed",
        gradients_on_several_streams,
        ("batched view", "one bucket"),
    ),
)


def count_wrong(device: Device, index: int) -> int:
    """Runs the scenario without the wait; how many gradients were wrong on this rank."""
    removed = REMOVED[index]
    with device.late.waits_ignored(removed.function):
        removed.scenario(device, *removed.arguments)
    num_wrong = len(device.wrong)
    device.wrong.clear()
    return num_wrong
