"""The measuring code of ``make gpu`` on CPU, and its evaluation of profiles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

import gpu_report  # noqa: E402
from gpu_parts import PARTS, measure  # noqa: E402
from gpu_profile import Event, common_length, count, merge, overlap  # noqa: E402
from gpu_results import Results  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.mark.full_only
def test_the_measuring_code_runs_on_cpu() -> None:
    results = Results()
    results.runs["2001-01-01T00:00 made-up"] = {"kind": "cpu", "device": "CPU", "torch": "0.0"}
    results.runs["2001-01-01T00:00 made-up"] |= {"python": "0.0"}
    for name, part in PARTS.items():
        row = measure(part, "cpu", tiny=True, limit_s=part.limit_s)
        assert row["outcome"] == "passed", row
        results.parts[name] = row | {"run": "2001-01-01T00:00 made-up"}
    found = {name: row["results"] for name, row in results.parts.items()}
    step, small, shared = found["step"], found["small_step"], found["shared_step"]
    assert list(step["models"]) == ["ResNet-like", "GPT-like"]
    assert (step["ranks"], shared["ranks"]) == (1, 2)
    for figures in (
        *step["models"].values(),
        *small["models"].values(),
        *shared["models"].values(),
    ):
        names = figures["contenders"]
        assert {"bare", "bare again", "DDP, views", "DDP, static, views"} <= set(names)
        assert "ddpx, views" in names
        assert figures["best_ddp"] in names and figures["rounds"] >= 3
        for row in names.values():
            assert row["ms"] > 0 and row["to_bare"] > 0 and row["kernels"] > 0
    assert "ddpx, views, forced" in step["models"]["GPT-like"]["contenders"]
    assert "ddpx, default, forced, 64 KiB" in small["models"]["10 small layers"]["contenders"]
    for row in found["graph"]["graph"]["contenders"].values():
        assert row["captured"] and row["identical"] and row["not_written"] == 0
    text = gpu_report.report(results)  # of the same form as the figures of a GPU
    assert "| ddpx, views, forced | yes | identical |" in text and "ResNet-like, 2 ranks" in text


def _kernel(name: str, begin_ms: int, end_ms: int, num_bytes: int = 0) -> Event:
    return Event(name, (begin_ms * 10**6, end_ms * 10**6), num_bytes)


def test_overlap_is_of_what_is_sent_with_what_is_computed() -> None:
    events = [
        _kernel("gemm", 0, 4),
        _kernel("gemm", 3, 6),
        _kernel("gemm", 10, 12),
        _kernel("ncclDevKernel_AllReduce_Sum", 5, 11),
        _kernel("Memset (Device)", 0, 20),
        _kernel("Memcpy DtoD (Device -> Device)", 0, 20, num_bytes=1000),
    ]
    found = overlap(events)
    assert found == {"communication_ms": 6.0, "computation_ms": 8.0, "share": pytest.approx(1 / 3)}
    assert overlap(events[:3])["share"] is None
    over_gloo = [*events[:3], _kernel("Memcpy DtoH (Device -> Pinned)", 11, 13, num_bytes=50)]
    assert overlap(over_gloo)["share"] == pytest.approx(0.5)
    counts = count(events, num_steps=2)
    assert (counts["kernels"], counts["copies"], counts["fills"]) == (2.0, 0.5, 0.5)
    assert (counts["copied_bytes"], counts["communication"]) == (500.0, 0.5)


def test_spans() -> None:
    assert merge([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert common_length([(0, 10)], [(2, 3), (3, 5), (9, 20)]) == 4
    assert common_length([], [(0, 1)]) == 0
