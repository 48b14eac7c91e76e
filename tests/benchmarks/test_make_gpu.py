"""``make gpu`` without a GPU: the driver, the measuring code on CPU, and the report.

The record in this file is invented and marked as such. None of its numbers was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import on_devices

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

import gpu  # noqa: E402
import gpu_report  # noqa: E402
from gpu_profile import Event, common_length, count, merge, overlap  # noqa: E402

pytestmark = pytest.mark.timeout(300)

ROW = {"ms": 2.5, "to_bare": 1.25, "to_best_ddp": 0.95, "kernels": 321.0, "copied_bytes": 2.0**22}
CONTENDERS = {
    "bare": ROW | {"overlap": {"share": None}},
    "DDP, views": ROW | {"overlap": {"share": 0.5}},
    "ddpx, views": ROW | {"overlap": {"share": 0.75}},
}
STEPS = {"rounds": 9, "best_ddp": "DDP, views", "contenders": CONTENDERS}
CAPTURED = {"captured": True, "identical": True, "largest_difference": 0.0, "not_written": 0}


def test_tests_are_grouped_by_backend_and_ranks():
    ids = [param.id for param in on_devices(1, 8).args[1]]
    groups = {gpu._group(f"tests/devices/test_made_up.py::test_it[{id_}]") for id_ in ids}
    nccl = {f"nccl, {size} ranks" for size in (2, 3, 4)}
    assert groups == {"others", "nccl, 1 rank", *nccl, "gloo, 3 ranks", "gloo, 8 ranks"}
    of_parity = "tests/devices/test_made_up.py::test_it[cuda-gloo-2-MLP,-fp64-default]"
    assert gpu._group(of_parity) == "gloo, 2 ranks"


def _made_up_record() -> dict[str, Any]:
    tests = {
        "status": "failed",
        "collected": 12,
        "counts": {"passed": 9, "failed": 1, "error": 0, "skipped": 2},
        "groups": {"nccl, 1 rank": {"passed": 5, "failed": 1}, "gloo, 2 ranks": {"passed": 4}},
        "failures": [{"id": "tests/devices/test_made_up.py::test_it", "text": "AssertionError"}],
        "error": "",
    }
    step = {"ranks": 1, "backend": "nccl", "models": {"made-up model": STEPS}}
    graph = {"bare": CAPTURED | {"eager_ms": 2.0, "replay_ms": 1.5}, "DDP": {"captured": False}}
    return {
        "schema": 1,
        "date": "2001-01-01 00:00 UTC",
        "commit": "made-up",
        "sources": "made-up",
        "machine": {"kind": "cuda", "device": "made-up GPU", "torch": "0.0", "python": "0.0"},
        "parts": {
            "build": {"status": "passed", "seconds": 1.0},
            "tests": tests,
            "step": {"status": "passed", "error": "", "results": step},
            "graph": {
                "status": "passed",
                "results": {"graph": {"model": "m", "contenders": graph}},
            },
            "shared_step": {"status": "failed", "error": "first line\nlast line", "results": {}},
            "sanitizer": {"status": "not run"},
        },
    }


def _pages(folder: Path) -> list[str]:
    """Options that name a README and a page, both with old texts between the marks."""
    readme, page = folder / "README.md", folder / "gpu.md"
    readme.write_text("a\n{}\nold status\n{}\nb\n".format(*gpu_report.STATUS))
    page.write_text("b\n{}\nold table\n{}\nc\n".format(*gpu_report.TABLE))
    return ["--readme", str(readme), "--page", str(page)]


def _report(folder: Path, record: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    file = folder / "gpu.json"
    file.write_text(json.dumps(record))
    command = [sys.executable, str(ROOT / "scripts" / "gpu_report.py"), str(file)]
    command += _pages(folder)
    return subprocess.run(command, text=True, capture_output=True)


def test_the_report_writes_between_the_marks(tmp_path: Path) -> None:
    done = _report(tmp_path, _made_up_record())
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(
        "a\n<!-- gpu status: begin -->\n**GPU:** last run on 2001-01-01, on one "
    )
    assert "9 device tests passed, 1 failed, 0 did not run" in text
    assert "old" not in text and text.endswith("<!-- gpu status: end -->\nb\n")
    text = (tmp_path / "gpu.md").read_text()
    assert "old" not in text and text.endswith("<!-- gpu: end -->\nc\n")
    for part in (
        "2001-01-01 00:00 UTC, one made-up GPU",
        "| device tests: nccl, 1 rank | 5 | 1 | 0 |",
        "- `tests/devices/test_made_up.py::test_it` (tests)",
        "- part `shared_step` failed: `last line`",
        "| under TORCH_CUDA_SANITIZER=1: not run |",
        "| DDP, views (best) | 2.50 | 1.250 | 0.950 | 321 | 4.0 | 50 % |",
        "| ddpx, views | 2.50 | 1.250 | 0.950 | 321 | 4.0 | 75 % |",
        "| bare | yes | identical | 2.00 | 1.50 |",
        "| DDP | no | - | - | - |",
    ):
        assert part in text, (part, text)


def test_the_report_takes_no_other_runs(tmp_path: Path) -> None:
    on_cpu = _made_up_record()
    on_cpu["machine"] = {"kind": "cpu", "device": "CPU"}
    for record, reason in ((on_cpu, "not on a GPU"), ({"schema": 99}, "schema 99")):
        done = _report(tmp_path, record)
        assert done.returncode == 1 and reason in done.stderr
        assert "old status" in (tmp_path / "README.md").read_text()
        assert "old table" in (tmp_path / "gpu.md").read_text()


def test_the_readme_says_what_ran_in_its_first_screen() -> None:
    text = (ROOT / "README.md").read_text()
    status = text.partition(gpu_report.STATUS[0])[2].partition(gpu_report.STATUS[1])[0]
    page = (ROOT / "docs" / "gpu.md").read_text()
    table = page.partition(gpu_report.TABLE[0])[2].partition(gpu_report.TABLE[1])[0]
    assert text[: text.index(status)].count("\n") < 25
    assert ("never run on a GPU" in status) == ("Never run on a GPU." in table)
    assert "last run on" in status or "never run on a GPU" in status


# ---- the driver ----------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_the_driver_says_so_in_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts" / "gpu.py"),
        "--out",
        str(tmp_path / "gpu.json"),
    ]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu: no CUDA device here") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


DEVICE_TESTS = """
import time
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("world_size", [1, 3, 2], ids=["cuda-nccl-1", "cuda-gloo-3", "cuda-nccl-2"])
def test_over(world_size):
    assert world_size < 3, "three ranks are one too many"

@pytest.mark.skip(reason="a reason to skip")
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise RuntimeError("a broken fixture")

def test_with_it(broken):
    pass
"""


def _tests_of(folder: Path, text: str, limit_s: float = 60.0) -> dict[str, Any]:
    (folder / "test_made_up.py").write_text(text)
    return gpu._tests(argparse.Namespace(tests=[str(folder)]), limit_s)


def test_what_became_of_each_test_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_needs_more.py").write_text("import a_module_that_nobody_has")
    part = _tests_of(tmp_path, DEVICE_TESTS)
    assert part["status"] == "failed"
    assert part["collected"] == 5
    assert part["counts"] == {"passed": 2, "failed": 1, "error": 2, "skipped": 1}
    assert part["groups"]["nccl, 1 rank"] == {"passed": 1}
    assert part["groups"]["gloo, 3 ranks"] == {"failed": 1}
    assert list(part["skips"]) == ["Skipped: a reason to skip"]
    texts = {failure["id"].split("::")[-1]: failure["text"] for failure in part["failures"]}
    assert "three ranks are one too many" in texts["test_over[cuda-gloo-3]"]
    assert "a broken fixture" in texts["test_with_it"]
    assert "a_module_that_nobody_has" in str(texts)


def test_a_run_that_is_cut_short_keeps_what_it_has(tmp_path: Path) -> None:
    text = DEVICE_TESTS + "\ndef test_hangs():\n    time.sleep(600)\n"
    start = time.monotonic()
    part = _tests_of(tmp_path, text, limit_s=15.0)
    assert time.monotonic() - start < 60
    assert part["status"] == "timed out"
    assert part["counts"]["passed"] == 2
    assert [name.split("::")[-1] for name in part["unfinished"]] == ["test_hangs"]


def test_nothing_but_skips_is_no_success(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.gpu\ndef test_it():\n    pytest.skip('no GPU')\n"
    part = _tests_of(tmp_path, text)
    assert (part["status"], part["error"]) == ("failed", "every test was skipped")


def _run_main(
    monkeypatch: pytest.MonkeyPatch, out: Path, parts: dict[str, Any], *options: str
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(gpu, "PARTS", {**gpu.PARTS, **parts})
    command = ["gpu.py", "--device", "cpu", "--tiny", "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", command)
    return gpu.main(), json.loads(out.read_text())


def test_parts_run_one_after_another_in_what_time_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {}

    def part(name: str, status: str) -> Any:
        def run(arguments: argparse.Namespace, limit_s: float) -> dict[str, Any]:
            limits[name] = limit_s
            return {"status": status, "error": ""}

        return run

    statuses = dict.fromkeys(gpu.PARTS, "passed") | {"tests": "timed out"}
    fakes = {name: part(name, status) for name, status in statuses.items()}
    code, record = _run_main(monkeypatch, tmp_path / "gpu.json", fakes, "--total-s", "100")
    assert code == 1
    assert {name: part["status"] for name, part in record["parts"].items()} == statuses
    assert limits["step"] == gpu.LIMITS_S["step"] and 0 < limits["sanitizer"] <= 100
    assert record["machine"]["kind"] == "cpu" and record["commit"] and record["sources"]

    fakes["build"] = part("build", "failed")
    _, record = _run_main(monkeypatch, tmp_path / "gpu.json", fakes)
    assert {p["status"] for name, p in record["parts"].items() if name != "build"} == {"not run"}

    _, record = _run_main(monkeypatch, tmp_path / "gpu.json", fakes, "--total-s", "5")
    assert record["parts"]["build"]["error"] == "no time was left"


# ---- measuring -----------------------------------------------------------------------------------


@pytest.mark.full_only
def test_the_measuring_code_runs_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = ("step", "graph", "shared_step")
    code, record = _run_main(monkeypatch, tmp_path / "gpu.json", {}, "--parts", *measuring)
    assert code == 0, record
    step, graph, shared = (record["parts"][name]["results"] for name in measuring)
    assert list(step["models"]) == ["ResNet-like", "GPT-like"]
    assert (step["ranks"], shared["ranks"]) == (1, 2)
    for figures in (*step["models"].values(), *shared["models"].values()):
        names = figures["contenders"]
        assert {"bare", "bare again", "DDP, views", "DDP, static, views", "ddpx, views"} <= set(
            names
        )
        assert figures["best_ddp"] in names and figures["rounds"] >= 3
        for row in names.values():
            assert row["ms"] > 0 and row["to_bare"] > 0 and row["kernels"] > 0
    assert "ddpx, views, forced" in step["models"]["GPT-like"]["contenders"]
    for row in graph["graph"]["contenders"].values():
        assert row["captured"] and row["identical"] and row["not_written"] == 0
    text = gpu_report.report(record)  # of the same form as the record of a GPU
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
