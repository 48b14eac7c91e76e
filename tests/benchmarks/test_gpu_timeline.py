"""benchmarks/gpu_timeline.py without a GPU: a smoke run, and comparison with made-up kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.profiler import record_function

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "scripts")]

import gpu_timeline_report as report  # noqa: E402
from gpu_kernels import (  # noqa: E402
    ClockReadings,
    Profiled,
    RecordedStep,
    compare,
    exposed_on_device,
    read_events,
)
from gpu_profile import Event, Events, Span, profile_events  # noqa: E402

from ddpx import _C  # noqa: E402

pytestmark = pytest.mark.timeout(200)


def _ms(begin: float, end: float) -> Span:
    return round(1e6 * begin), round(1e6 * end)


# ---- the comparison ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "agrees"),
    [
        ((10, 30), True),
        ((9, 31), True),  # 2 ms of 20 ms are not common
        ((8.9, 31), False),
        ((29, 31), False),
        ((31, 40), False),
    ],
)
def test_a_reduction_must_overlap_its_kernel(recorded, agrees):
    step = RecordedStep(7, [_ms(*recorded)], [1 << 20], 0)
    found = compare([step], Profiled([_ms(10, 30)], [], [], 0.0), on_device=True)
    assert found["buckets"][0]["agrees"] == agrees == bool(found["buckets_agree"])
    assert found["buckets"][0]["begin_us"] == pytest.approx(1e3 * (recorded[0] - 10))


def test_short_kernels_may_differ_by_50_us():
    for late_ms, agrees in ((0.05, True), (0.051, False)):
        step = RecordedStep(7, [_ms(10, 10.1 + late_ms)], [4], 0)
        found = compare([step], Profiled([_ms(10, 10.1)], [], [], 0.0), on_device=True)
        assert found["buckets"][0]["agrees"] == agrees


def test_exposed_time_is_that_of_all_reduces_after_the_last_kernel():
    kernels = [_ms(10, 20), _ms(22, 30), _ms(30, 34)]
    computation = [_ms(0, 9), _ms(5, 24), _ms(34, 50)]
    assert exposed_on_device(kernels, computation) == 10e6
    assert exposed_on_device(kernels, [*computation, _ms(33, 34.5)]) == 0
    steps = [RecordedStep(1, kernels, [4] * 3, 11_000_000)]
    found = compare(steps, Profiled(kernels, computation, [], 0.0), on_device=True)
    assert found["exposed"][0]["agrees"]
    assert (found["buckets_agree"], found["exposed_agree"]) == (1, 1)


def test_another_number_of_kernels_is_an_error():
    step = RecordedStep(1, [_ms(0, 1)] * 3, [4] * 3, 0)
    with pytest.raises(RuntimeError, match=r"3 reductions .* in 1 steps, .* 2 all-reduces"):
        compare([step], Profiled([_ms(0, 1)] * 2, [], [], 0.0), on_device=True)


# ---- clocks --------------------------------------------------------------------------------------


def test_the_clocks_are_related_by_ranges_on_the_host():
    readings = ClockReadings()
    stamps: list[int] = []

    def run() -> None:
        readings.read()
        stamps.append(_C.steady_now())
        with record_function("a range"):
            pass
        stamps.append(_C.steady_now())
        readings.read()

    events = profile_events(run, "cpu")
    offset_ns, error_ns = readings.offset(events.ranges)
    (found,) = (event.span for event in events.ranges if event.name == "a range")
    assert stamps[0] - error_ns <= found[0] + offset_ns <= found[1] + offset_ns
    assert found[1] + offset_ns <= stamps[1] + error_ns
    assert error_ns < 1e6


def test_lost_readings_are_an_error():
    readings = ClockReadings()
    readings.read()
    with pytest.raises(RuntimeError, match="the clock was read 20 times, but the profiler has 0"):
        readings.offset([])


def test_kernels_are_told_by_their_names():
    readings = ClockReadings()
    ranges = profile_events(readings.read, "cpu").ranges
    offset_ns, _ = readings.offset(ranges)
    names = ["ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_AllGather_RING_LL", "gemm"]
    device = [Event(name, (place, place + 1), 0) for place, name in enumerate(names)]
    host = [Event("ddpx::wait", (5, 6), 0), Event("aten::mm", (6, 7), 0)]
    ranges.append(Event("nccl:all_reduce", (0, 1), 0))
    found = read_events(Events(host, ranges, device), readings)
    shift = round(offset_ns)
    assert found.reductions == [(shift, shift + 1)]
    assert found.computation == [(shift + 2, shift + 3)]
    assert found.waits == [(shift + 5, shift + 6)]


# ---- the command, and its report -----------------------------------------------------------------


def test_the_command_runs_on_cpu(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/gpu_timeline.py", "--device", "cpu", "--tiny"]
    command += ["--what", "profiler", "cost", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    for found in figures["profiler"]["ranks"]:
        assert len(found["exposed"]) == 2 and len(found["buckets"]) >= 4
        assert found["clock_error_us"] < 1000
        # A busy machine delays the thread that notices an end, by a few ms.
        assert found["median_end_us"] < 10_000
    for found in figures["cost"].values():
        if isinstance(found, dict):
            assert found["rounds"] >= 5 and found["recorded_to_not"] > 0 and found["events"] > 20
    names = {path.name for path in tmp_path.iterdir()}
    assert {"profiled.txt", "profiled.json", "profiled.html"} <= names
    page = tmp_path / "page.md"
    page.write_text(f"a\n<!-- {report.MARK}: begin -->\nold\n<!-- {report.MARK}: end -->\nb\n")
    report.write_between_marks(page, report.MARK, report.text_of(figures))
    text = page.read_text()
    assert "| 0 | " in text and "Part `advice`: not run" in text and "old" not in text


def test_the_report_counts_right_first_sentences():
    rows = [{"first": "slow compute"}, {"first": "late start"}]
    text = report.text_of(
        {"device": "made-up", "backend": "none", "advice": {"slow compute": rows}}
    )
    assert "| slow compute | 1 of 2 | late start |" in text
    assert "Part `profiler`: not run" in text


def test_the_page_has_the_marks():
    text = report.PAGE.read_text()
    assert f"<!-- {report.MARK}: begin -->" in text and f"<!-- {report.MARK}: end -->" in text
