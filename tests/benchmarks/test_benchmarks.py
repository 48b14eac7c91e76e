"""Runs all benchmarks from end to end, on small models and with few rounds."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("step_time", "all_reduce", "overlap", "memory", "find_unused", "growth", "tax")
LONG_PARTS = ("recording", "health")  # each takes as long as the others together
MARKS = ("<!-- benchmarks: begin -->", "<!-- benchmarks: end -->")
PLOTS = ("step_time", "all_reduce", "growth")

pytestmark = pytest.mark.timeout(400)  # takes a minute on two idle cores


def _only(parts: Sequence[str]) -> list[str]:
    return [word for part in parts for word in ("--only", part)]


def _run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "README.md").write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    told = _run("benchmarks/run.py", "--quick", *_only(PARTS), "--output", str(folder))
    page = (folder / "docs" / "benchmarks.md").read_text()
    assert told.count(", goal ") == page.count("**missed**")
    return folder


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)):
        yield value


def _check_results(output: Path, name: str) -> None:
    text = (output / "benchmarks" / "results" / f"{name}.json").read_text()
    record = json.loads(text)
    assert {"processor", "cores", "memory", "versions", "command", "date", "load"} <= record.keys()
    numbers = list(_numbers(record["results"]))
    assert numbers and all(math.isfinite(number) for number in numbers)
    assert len(text) < 200_000


@pytest.mark.parametrize("name", PARTS)
def test_results_are_written(output: Path, name: str) -> None:
    _check_results(output, name)


@pytest.mark.full_only
def test_results_of_long_parts_are_written(tmp_path: Path) -> None:
    _run("benchmarks/run.py", "--quick", *_only(LONG_PARTS), "--output", str(tmp_path))
    for name in LONG_PARTS:
        _check_results(tmp_path, name)


def test_the_page_has_all_parts_and_verdicts(output: Path) -> None:
    page = (output / "docs" / "benchmarks.md").read_text()
    for title in ("Goals", "Step time", "All-reduce alone", "Memory", "find_unused_parameters"):
        assert f"\n## {title}\n" in page
    for contender in ("bare again", "ddpx over gloo, default", "ddpx automatic, views", "resident"):
        assert contender in page
    assert "A smoke run" in page
    assert "step of ddpx over shm, views / best DDP's" in page


def test_tables_of_steps_begin_with_the_noise_and_have_ddp_beside_ddpx_over_shm(
    output: Path,
) -> None:
    page = (output / "docs" / "benchmarks.md").read_text()
    section = page.partition("## Step time")[2].partition("\n## ")[0]
    tables = re.findall(r"\|-[-|]+\|\n((?:\|.*\n)+)", section)
    assert len(tables) == 3 * 2
    for rows in tables:
        names = [row.split("|")[1].strip() for row in rows.splitlines()]
        assert names[0] == "noise: DDP, views / itself"
        assert names[-2:] == ["DDP over shm, views, batched copy", "ddpx over shm, views"]


def test_the_readme_gets_a_table_between_its_marks(output: Path) -> None:
    readme = (output / "README.md").read_text()
    assert readme.startswith(f"before\n{MARKS[0]}\n") and readme.endswith(f"{MARKS[1]}\nafter\n")
    assert "old" not in readme and "| step / step of the best DDP over gloo" in readme


@pytest.mark.parametrize("name", PLOTS)
def test_plots_are_drawn(output: Path, name: str) -> None:
    plot = output / "docs" / "benchmarks" / f"{name}.png"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full_only
def test_one_part_can_be_measured_anew(output: Path) -> None:
    results = output / "benchmarks" / "results"
    before = {name: (results / f"{name}.json").stat().st_mtime_ns for name in PARTS}
    _run("benchmarks/run.py", "--quick", *_only(["all_reduce"]), "--output", str(output))
    after = {name: (results / f"{name}.json").stat().st_mtime_ns for name in PARTS}
    assert [name for name in PARTS if before[name] != after[name]] == ["all_reduce"]
