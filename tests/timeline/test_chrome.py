"""Chrome trace events of a recording made by hand."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from synthetic import BEGIN_MS, PARAM_NAMES, accumulated, make_recording, one_rank_alone

from ddpx.timeline.export.chrome import to_events

Event = dict[str, Any]


@pytest.fixture(scope="module")
def events() -> list[Event]:
    found = to_events(make_recording())
    assert json.loads(json.dumps(found)) == found
    return found


def _track_names(events: list[Event]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }


def _slices(events: list[Event], rank: int, track: str) -> list[tuple[str, float, float]]:
    """Name, begin and end in ms since the start of step 12, in order of time."""
    names = _track_names(events)
    found = [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event["ph"] == "X"
        and event["pid"] == rank
        and names[event["pid"], event["tid"]] == track
    ]
    origin = BEGIN_MS[12]
    return [(name, begin / 1e3 - origin, end / 1e3 - origin) for begin, end, name in sorted(found)]


def test_processes_and_threads_are_named(events):
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0 (host)", 1: "rank 1 (host)"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert order == {0: 0, 1: 1}
    tracks = defaultdict(list)
    for (rank, _), name in sorted(_track_names(events).items()):
        tracks[rank].append(name)
    before = ["step", "forward/backward", "reducer phase"]
    # Rank 0 has at most two buckets in flight, rank 1 three (in step 13).
    assert tracks[0] == [*before, *["communication"] * 2, "wait"]
    assert tracks[1] == [*before, *["communication"] * 3, "wait"]
    in_order = [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"]
    assert in_order == sorted(set(in_order))


def test_threads_are_not_taken_for_others(events):
    tids = [tid for _, tid in _track_names(events)]
    assert len(set(tids)) == len(tids)
    assert not set(tids) & {0, 1}  # 0 and 1 are the numbers of the processes


def test_times_of_every_track(events):
    assert _slices(events, 0, "step") == [("step 12", 0, 43), ("step 13", 50, 90)]
    assert _slices(events, 1, "step") == [("step 12", 2, 42), ("step 13", 50, 89)]
    assert _slices(events, 1, "forward/backward") == [
        ("forward", 2, 14),
        ("backward", 15, 38),
        ("forward", 50, 60),
        ("backward", 61, 79),
    ]
    assert _slices(events, 0, "reducer phase") == [
        ("collecting", 16, 32),
        ("finalizing", 32, 43),
        ("rebuilding", 51, 54),
        ("collecting", 68, 84),
        ("finalizing", 84, 90),
    ]
    assert _slices(events, 0, "communication")[:3] == [
        ("bucket 0", 18, 26),
        ("bucket 1", 24, 36),
        ("bucket 2", 30, 40),
    ]
    assert _slices(events, 0, "wait")[:6] == [
        ("wait for bucket 0", 32, 32),
        ("write bucket 0 back", 32, 33),
        ("wait for bucket 1", 33, 36),
        ("write bucket 1 back", 36, 37),
        ("wait for bucket 2", 37, 41),
        ("write bucket 2 back", 41, 42),
    ]


def test_slices_of_one_track_do_not_cross(events):
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    assert len(tracks) == 6 + 7
    for slices in tracks.values():
        slices.sort(key=lambda event: (event["ts"], event["dur"]))
        for earlier, later in pairwise(slices):
            assert earlier["ts"] + earlier["dur"] <= later["ts"]


def test_gradients(events):
    found = [e for e in events if e["ph"] == "i" and e["pid"] == 1]
    assert [(e["args"]["param"], e["ts"] / 1e3 - BEGIN_MS[12]) for e in found[:5]] == [
        ("2.bias", 20),
        ("2.weight", 22),
        ("1.weight", 29),
        ("0.bias", 34),
        ("0.weight", 36),
    ]
    names = _track_names(events)
    assert {names[e["pid"], e["tid"]] for e in found} == {"forward/backward"}
    assert len(found) == 2 * len(PARAM_NAMES)


def test_what_a_bucket_tells(events):
    first = {e["name"]: e["args"] for e in reversed(events) if e["ph"] == "X" and e["pid"] == 0}
    assert first["bucket 1"] == {
        "index": 1,
        "bytes": 2 << 20,
        "params": ["1.weight"],
        "ready_ms": 24,
        "launched_ms": 24,
        "completed_ms": 36,
        "written_back_ms": 37,
        "waited_for_rank": 1,
        "waited_for_param": None,  # rank 1 begins its backward 3 ms later
        "waited_ms": 5,
    }
    assert first["bucket 2"]["waited_for_param"] == "0.weight"
    assert first["step 12"] == {
        "whole_ms": 43,
        "compute_ms": 30,
        "communication_ms": 22,
        "overlapped_ms": 16,
        "exposed_ms": 6,
    }


def test_queued_behind_an_earlier_bucket():
    """Bucket 1 was ready first, but was launched at the gradient for which bucket 0 waited."""
    recording = make_recording()
    step = recording.steps[1]
    begin = step.ranks[1].backward.begin  # else rank 0 would be late before its first gradient
    rank_0 = replace(step.ranks[0], backward=replace(step.ranks[0].backward, begin=begin))
    step = replace(step, ranks={**step.ranks, 0: rank_0})
    events = to_events(replace(recording, steps=(step,)))
    args = next(e["args"] for e in events if e["name"] == "bucket 1" and e["pid"] == 0)
    assert args["launched_ms"] - args["ready_ms"] == 5
    assert (args["waited_for_rank"], args["waited_for_param"]) == (0, "2.weight")


def test_one_rank_alone_has_no_communication():
    events = to_events(one_rank_alone())
    assert _slices(events, 0, "communication") == []
    assert _slices(events, 0, "wait") == []
    assert _slices(events, 0, "step") == [("step 12", 0, 32)]
    assert sum(e["ph"] == "i" for e in events) == len(PARAM_NAMES)


def test_backwards_in_no_sync():
    events = [e for e in to_events(accumulated()) if e["name"] == "backward in no_sync()"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in events] == [(0, 81_000, 15_000)]
