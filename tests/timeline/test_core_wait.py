"""How long a rank is without a core, and which steps were asked for: measured by the recorder."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from recorded_models import small_model, train_step

import ddpx
from ddpx.timeline import Timeline
from ddpx.timeline.record.core_wait import CoreWait


def _compute(seconds: float) -> None:
    x = torch.ones(300, 300)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        x @ x  # without the GIL


def _share_with(num_others: int) -> float | None:
    """The share of a thread that computes beside others on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # of this thread, and of threads that it starts
    try:
        others = [threading.Thread(target=_compute, args=(0.6,)) for _ in range(num_others)]
        for other in others:
            other.start()
        wait = CoreWait()
        _compute(0.5)
        share = wait.share()
        for other in others:
            other.join()
    finally:
        os.sched_setaffinity(0, allowed)
    return share


def test_share_of_a_thread_that_has_no_core():
    share = _share_with(3)
    if share is None:
        pytest.skip("this kernel does not count waits for cores")
    assert 0.2 < share <= 1


def test_no_share_without_a_counter(monkeypatch):
    monkeypatch.setattr(threading, "get_native_id", lambda: "none")
    assert CoreWait().share() is None


def test_a_wait_between_a_count_and_its_time_is_within_the_time(monkeypatch):
    counts = iter((0, 50_000_000))

    def count_late(_: CoreWait) -> int:
        count = next(counts)
        time.sleep(count / 1e9)
        return count

    monkeypatch.setattr(CoreWait, "_read", count_late)
    share = CoreWait().share()
    assert share is not None and 0 < share <= 1


def _record() -> Timeline:
    model = small_model()
    with ddpx.record(model, max_steps=6) as timeline:
        for _ in range(4):
            train_step(model)
    return timeline


def test_what_the_recorder_adds(ranks):
    cores = tuple(sorted(os.sched_getaffinity(0)))
    for timeline in ranks(2).run(_record):
        recording = timeline.recording
        assert recording.cores == {0: cores, 1: cores}
        assert recording.num_threads == {0: 1, 1: 1}
        assert all(0 <= share <= 1 for share in recording.core_waits.values())
        lines = str(timeline.summary()).splitlines()
        assert lines[0].startswith("3 steps (1 to 3) of 2 of 2 ranks over shm")
        assert lines[1] == (
            "Only 4 of the 6 steps that were asked for were completed while the recording ran."
        )
        assert lines[2] == "Step 0 left out: its buckets were not rebuilt yet."


def test_what_a_file_keeps(ranks, tmp_path):
    timeline = ranks(2).run(_record)[0]
    timeline.export_chrome_trace(tmp_path / "trace.json")
    loaded = Timeline.load(tmp_path / "trace.json").recording
    for name in ("asked_steps", "cores", "num_threads", "core_waits"):
        assert getattr(loaded, name) == getattr(timeline.recording, name)
