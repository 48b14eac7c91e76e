"""``make gpu`` without a GPU: what is missing, its order, interrupted runs, and the report.

The results in this file are invented and marked as such.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import on_devices

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts")]

import gpu  # noqa: E402
import gpu_report  # noqa: E402
import gpu_sources  # noqa: E402
from gpu_order import RANKS, in_order, ranks_of, sanitized  # noqa: E402
from gpu_parts import PARTS, Part  # noqa: E402
from gpu_results import NEWER, NO_TIME, Results, Unusable, load  # noqa: E402
from gpu_sources import digest_of_test, sources_digest  # noqa: E402

MADE_UP = {"kind": "cuda", "device": "made-up GPU", "torch": "0.0", "python": "0.0"}
FIRST, SECOND = "2001-01-01T00:00 made-up", "2001-01-02T00:00 newer+"
FILE = "tests/devices/test_device_parity.py"


def _row(outcome: str = "passed", run: str = FIRST, **more: Any) -> dict[str, Any]:
    return {"outcome": outcome, "seconds": 1.0, "run": run, "sources": "old", **more}


def _results(tests: dict[str, dict[str, Any]]) -> Results:
    results = Results()
    results.runs = {FIRST: MADE_UP, SECOND: MADE_UP}
    results.tables["tests"] = tests
    return results


# ---- the file ------------------------------------------------------------------------------------


def test_the_file_has_one_line_for_each_test(tmp_path: Path) -> None:
    results = _results({"b": _row(), "a": _row("failed", text="two\nlines")})
    results.parts["step"] = _row(results={"z": 1, "a": 2})
    results.save(tmp_path / "gpu.json")
    lines = (tmp_path / "gpu.json").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('"a": '))
    assert json.loads("{" + lines[first + 1] + "}") == {"b": _row()}
    again = load(tmp_path / "gpu.json")
    assert again.tables == results.tables
    assert list(again.parts["step"]["results"]) == ["z", "a"]
    assert list(again.runs) == [FIRST]  # no result is from the other run
    (tmp_path / "gpu.json").write_text('{"schema": 1}')
    with pytest.raises(Unusable, match="schema 1, but 2 is expected"):
        load(tmp_path / "gpu.json")


def test_the_newer_result_wins_a_merge() -> None:
    old = _results({"both": _row(), "newer here": _row(run=SECOND), "gone": _row()})
    new = _results({"both": _row("failed", run=SECOND), "newer here": _row("failed")})
    new.expect("tests", ["both", "newer here", "added"], (), is_complete=True)
    old.merge(new)
    outcomes = {name: row["outcome"] for name, row in old.tests.items()}
    assert outcomes == {"both": "failed", "newer here": "passed", "added": "not run"}

    new.merge(_results({"both": _row(), "gone": _row()}))  # of an earlier run
    assert new.tests["both"]["outcome"] == "failed" and "added" in new.tests


def test_results_beyond_the_selection_are_kept() -> None:
    results = _results({"passed": _row(), "late": {"outcome": "not run"}, "gone": _row()})
    results.expect("tests", ["selected"], ["passed", "late", "never run"], is_complete=True)
    outcomes = {name: row["outcome"] for name, row in results.tests.items()}
    assert outcomes == {"passed": "passed", "selected": "not run"}


def test_a_new_row_has_its_reason() -> None:
    results = Results()
    results.expect("tests", ["old"], (), is_complete=True)
    results.expect("tests", ["old", "new"], (), is_complete=True, reason=NEWER)
    texts = {name: row["text"] for name, row in results.tests.items()}
    assert texts == {"old": NO_TIME, "new": NEWER}


def test_a_result_is_current_older_or_missing() -> None:
    results = _results({"passed": _row(), "skipped": _row("skipped"), "failed": _row("failed")})
    results.expect("tests", ["passed", "skipped", "failed", "new"], (), is_complete=True)
    states = {name: results.state("tests", name, "old") for name in results.tests}
    assert states == dict(passed="current", skipped="current", failed="missing", new="missing")
    assert results.state("tests", "passed", "other") == "older"


# ---- sources and order ---------------------------------------------------------------------------


def test_what_a_result_depends_on(tmp_path: Path) -> None:
    texts = {
        "setup.py": "",
        "csrc/reducer/reducer.cpp": "int a;\n#include <b>\n",
        "csrc/shm/ring.cpp": "int r;",
        "ddpx/cli/main.py": "c = 1",
        "tests/devices/test_one.py": "import one_cases\nx = 1\n",
        "tests/devices/test_two.py": "y = 1\n",
        "tests/devices/one_cases.py": "from deeper import z\n",
        "tests/deeper.py": "z = 1\n",
    }

    def digests(**changed: str) -> tuple[str, str]:
        for name, text in {**texts, **changed}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        sources_digest.cache_clear()
        gpu_sources._library.cache_clear()
        one, two = (sources_digest(f"tests/devices/test_{n}.py", tmp_path) for n in ("one", "two"))
        return one, two

    one, two = digests()
    assert one != two
    for unrelated in (
        {"csrc/shm/ring.cpp": "int s;"},
        {"ddpx/cli/main.py": "c = 2"},
        {"csrc/reducer/reducer.cpp": "// A comment\nint a;\n\n  #include <b>\n"},
        {"tests/deeper.py": "# A comment\nz = 1\n"},
    ):
        assert digests(**unrelated) == (one, two), unrelated
    changed = digests(**{"tests/deeper.py": "z = 2\n"})
    assert changed[0] != one and changed[1] == two
    changed = digests(**{"csrc/reducer/reducer.cpp": "int a;\n#include <c>\n"})
    assert changed[0] != one and changed[1] != two
    sources_digest.cache_clear()


def test_tests_are_ordered_by_ranks_and_file() -> None:
    ids = [param.id for param in on_devices(1, 2, 8).args[1]]
    assert {ranks_of(f"{FILE}::test_it[{id_}]") for id_ in ids} == {*RANKS}
    tests = [
        "tests/examples/test_examples.py::test_spawned",
        "tests/devices/test_device_streams.py::test_it[view-cuda-nccl-1]",
        f"{FILE}::test_it[cuda-gloo-2-MLP,-fp64-default]",
        f"{FILE}::test_it[cuda-nccl-4-MLP]",
        "tests/devices/test_device_streams.py::test_it[view-cuda-nccl-2]",
        f"{FILE}::test_it[cuda-nccl-2-MLP]",
    ]
    results = Results()
    results.expect("tests", tests, (), is_complete=True)
    found = in_order(tests, results, "tests", {"missing"})
    assert found == [tests[i] for i in (0, 5, 4, 1, 3, 2)]
    assert sanitized(tests) == [tests[1], tests[4], tests[5]]

    results.tests[tests[5]] = _row(sources=digest_of_test(tests[5]))
    results.tests[tests[4]] = _row()
    results.tests[tests[1]] = _row("failed")
    assert tests[1] in in_order(tests, results, "tests", {"missing"})[:2]
    assert in_order(tests, results, "tests", {"older"}) == [tests[4]]
    assert in_order(tests, results, "tests", {"missing", "older"})[1:3] == [tests[4], tests[1]]


# ---- the driver ----------------------------------------------------------------------------------

SHORT = [f"{FILE}::test_it[cuda-nccl-{n}-short]" for n in (2, 4)]
OTHERS = [f"{FILE}::test_it[cuda-nccl-2-other]"]


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs main() with made-up parts and tests. Returns its exit code, what ran, and the file."""
    ran: list[str] = []

    class FakeWorkers:
        def __init__(self, tests: list[str], number: int, report: Any, extra: Any) -> None:
            self.tests, self.report, self.end = tests, report, "ends" if extra else ""

        def run(self, limit_s: float) -> str:
            for test in self.tests:
                if test == FakeWorkers.interrupted_at:
                    sys.exit(1)
                ran.append(test + (" sanitizer" if self.end else ""))
                self.report(test, {"outcome": "passed", "seconds": 0.51, "text": ""})
            return ""

        interrupted_at = ""

    def measure(part: Part, device: str, tiny: bool, limit_s: float) -> dict[str, Any]:
        ran.append(part.about)
        return {"outcome": "passed", "results": {"made-up": limit_s}}

    monkeypatch.setattr(gpu, "build", lambda session: True)
    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "collect", lambda: (SHORT + OTHERS, SHORT, {}))
    monkeypatch.setattr(gpu, "Workers", FakeWorkers)
    monkeypatch.setattr(gpu, "PARTS", {"step": Part("step", "benchmarks/gpu_step.py", (), 90.0)})
    monkeypatch.setattr(gpu.signal, "signal", lambda *arguments: None)

    def run(*options: str, interrupted_at: str = "") -> tuple[int, list[str], Results]:
        ran.clear()
        FakeWorkers.interrupted_at = interrupted_at
        file = str(tmp_path / "gpu.json")
        command = ["gpu.py", "--device", "cpu", "--results", file, *options]
        monkeypatch.setattr(sys, "argv", command)
        try:
            code = gpu.main()
        except SystemExit as ending:
            code = int(str(ending.code))
        return code, list(ran), load(tmp_path / "gpu.json")

    return run


SANITIZED = f"{SHORT[0]} sanitizer"


def test_a_run_continues_where_the_one_before_was_interrupted(run_main: Any) -> None:
    code, ran, results = run_main(interrupted_at=SHORT[1])
    assert (code, ran) == (1, ["step", SHORT[0]])
    assert results.tests[SHORT[0]]["outcome"] == "passed"
    assert results.tests[SHORT[0]]["seconds"] == 0.5
    assert results.tests[SHORT[1]] == {"outcome": "not run", "text": NO_TIME}

    assert run_main()[:2] == (0, [SHORT[1], SANITIZED, *OTHERS])
    code, ran, results = run_main()
    assert (code, ran) == (0, [])
    assert "not run" not in {row["outcome"] for row in results.tests.values()}


def test_results_of_older_sources_run_last(
    run_main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_main(interrupted_at=OTHERS[0])
    monkeypatch.setattr(gpu, "digest_of_test", lambda test: "new")
    monkeypatch.setattr("gpu_order.digest_of_test", lambda test: "new")
    monkeypatch.setattr(gpu, "sources_digest", lambda file: "new")
    _, ran, results = run_main(interrupted_at=SANITIZED.partition(" ")[0])
    assert ran == [*OTHERS, "step"]
    assert results.tests[SHORT[0]]["sources"] != "new"  # stays as passed
    assert run_main("--changed", interrupted_at="")[1] == [*SHORT, SANITIZED]
    assert run_main("--tests", "short", "--out", str(tmp_path / "out.json"))[1] == SHORT


def test_a_part_that_needs_more_gpus_is_skipped(
    run_main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"step": Part("step", "benchmarks/gpu_step.py", (), 90.0, num_gpus=2)}
    monkeypatch.setattr(gpu, "PARTS", parts)
    _, ran, results = run_main("--parts", "step")
    assert ran == []
    assert results.parts["step"]["outcome"] == "skipped"
    assert results.parts["step"]["text"] == "needs two GPUs"


def test_without_time_nothing_starts(run_main: Any) -> None:
    assert run_main("--total-s", "10")[1] == []


def test_a_merge_writes_the_committed_file(run_main: Any, tmp_path: Path) -> None:
    code, _, results = run_main("--out", str(tmp_path / "gpu.json"))
    results.tests[SHORT[0]] = _row("failed", run="2999-01-01T00:00 later")
    results.runs["2999-01-01T00:00 later"] = MADE_UP
    results.save(tmp_path / "other.json")
    code, ran, results = run_main("--merge", str(tmp_path / "other.json"))
    assert (code, ran) == (0, [])
    assert results.tests[SHORT[0]]["outcome"] == "failed"
    assert results.tests[SHORT[1]]["outcome"] == "passed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_the_driver_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu.py")]
    command += ["--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu: no CUDA device here") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---- the report ----------------------------------------------------------------------------------

FIGURES = {"ms": 2.5, "to_bare": 1.25, "to_best_ddp": 0.95, "kernels": 321.0, "copies": 7.0}
CONTENDERS = {
    "bare": FIGURES | {"copied_bytes": 2.0**22, "overlap": {"share": None}},
    "DDP, views": FIGURES | {"copied_bytes": 2.0**22, "overlap": {"share": 0.5}},
}
CAPTURED = {"captured": True, "identical": True, "largest_difference": 0.0, "not_written": 0}
GRAPH = {
    "bare": CAPTURED | {"eager_ms": 2.0, "replay_ms": 1.5},
    "DDP": {"captured": False},
    "ddpx": {"captured": None},
}


def _made_up() -> Results:
    results = _results(
        {
            f"{FILE}::test_it[cuda-nccl-2-a]": _row(),
            f"{FILE}::test_it[cuda-nccl-2-b]": _row(run=SECOND),
            f"{FILE}::test_it[cuda-nccl-2-c]": _row("failed", text="AssertionError: a\nb\nc"),
            f"{FILE}::test_it[cuda-gloo-2-a]": _row("skipped", text="a reason"),
        }
    )
    names = [*results.tests, f"{FILE}::test_it[cuda-gloo-2-b]"]
    results.expect("tests", names, (), is_complete=True)
    results.expect("sanitizer", [names[0]], (), is_complete=True)
    steps = {"rounds": 9, "best_ddp": "DDP, views", "contenders": CONTENDERS}
    models = {"ranks": 1, "backend": "nccl", "models": {"made-up model": steps}}
    results.parts["step"] = _row(results=models)
    results.parts["graph"] = _row(
        "failed", text="the time limit\nended it", results={"graph": {"model": "m"}}
    )
    results.parts["graph"]["results"]["graph"]["contenders"] = GRAPH
    return results


def test_the_report_has_commits_and_reasons() -> None:
    text = gpu_report.report(_made_up())
    for part in (
        "- 2001-01-02 00:00 UTC, commit newer+: one made-up GPU",
        "| `test_device_parity.py` | nccl, 2 | made-up (1), newer+ (1) | 2 | 1 | 0 | 0 |",
        "| `test_device_parity.py` | gloo, 2 | - | 0 | 0 | 1 | 1 |",
        "| `test_device_parity.py`, sanitizer | nccl, 2 | - | 0 | 0 | 0 | 1 |",
        f"- `{FILE}::test_it[cuda-nccl-2-c]`, at made-up: `AssertionError: a b`",
        "- `graph` (part), at made-up: `the time limit ended it`",
        f"- 2 not run: {NO_TIME}",
        "- 1 skipped: a reason",
        f"- part `shared_step` ({PARTS['shared_step'].about}) not run: {NO_TIME}",
        "made-up model, 1 rank, nccl, medians over 9 rounds (made-up GPU, commit made-up):",
        "| DDP, views (best) | 2.50 | 1.250 | 0.950 | 321 | 7 | 4.0 | 50 % |",
        "| bare | yes | identical | 2.00 | 1.50 |",
        "| DDP | no | - | - | - |",
        f"| ddpx | not run: {NO_TIME} | - | - | - |",
    ):
        assert part in text, (part, text)
    for line in text.splitlines():
        is_heading = "passed at" in line or line == "Skipped, or not run:"
        assert is_heading or "not run" not in line or f"not run: {NO_TIME}" in line


def _write_report(folder: Path, results: Results) -> subprocess.CompletedProcess[str]:
    marks = {
        "README.md": "gpu status",
        "docs/gpu.md": "gpu",
        "docs/reliability.md": "nccl",
        "docs/timeline.md": "gpu timeline",
    }
    (folder / "docs").mkdir(exist_ok=True)
    for page, mark in marks.items():
        (folder / page).write_text(f"a\n<!-- {mark}: begin -->\nold\n<!-- {mark}: end -->\nb\n")
    results.save(folder / "gpu.json")
    command = [sys.executable, str(ROOT / "scripts" / "gpu_report.py"), str(folder / "gpu.json")]
    command += ["--root", str(folder)]
    return subprocess.run(command, text=True, capture_output=True)


def test_the_report_writes_between_the_marks(tmp_path: Path) -> None:
    done = _write_report(tmp_path, _made_up())
    assert done.returncode == 0, done.stderr
    readme, page = ((tmp_path / name).read_text() for name in ("README.md", "docs/gpu.md"))
    assert readme.startswith("a\n<!-- gpu status: begin -->\n**GPU:** last run on 2001-01-02, on")
    assert "2 device tests passed, 1 failed, 1 were skipped, 1 have not run" in readme
    assert "old" not in readme and readme.endswith("<!-- gpu status: end -->\nb\n")
    assert "old" not in page and page.endswith("<!-- gpu: end -->\nb\n")

    on_cpu = _made_up()
    on_cpu.runs[FIRST] = {"kind": "cpu", "device": "CPU"}
    done = _write_report(tmp_path, on_cpu)
    assert done.returncode == 1 and "not on a GPU" in done.stderr
    assert "old" in (tmp_path / "README.md").read_text()


def test_the_pages_have_the_committed_results() -> None:
    results = load(gpu.RESULTS)
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/gpu.md"))
    assert gpu_report.status(results) in readme[:2000]
    assert gpu_report.report(results) in page


def test_the_committed_file_has_each_test(tmp_path: Path) -> None:
    """Tests that no GPU has run are counted. After a new test: python scripts/gpu.py --collect"""
    out = tmp_path / "gpu.json"
    command = [sys.executable, ROOT / "scripts" / "gpu.py", "--collect", "--out", out]
    subprocess.run(command, check=True, timeout=100)
    committed, collected = load(gpu.RESULTS), load(out)
    for table in ("tests", "sanitizer"):
        assert committed.tables[table].keys() == collected.tables[table].keys()


def test_texts_of_results_have_no_folders_of_a_machine() -> None:
    text = f'File "/a/lib/python3.12/site-packages/torch/b.py"\n  File "{gpu.ROOT}/ddpx/c.py"'
    assert gpu._without_folders(text) == 'File "torch/b.py"\n  File "ddpx/c.py"'
