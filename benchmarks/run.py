"""Measures everything and writes docs/benchmarks.md, its plots, and benchmarks/results/*.json.

README.md gets a summary between its marks.

    python benchmarks/run.py [--quick] [--only NAME]...
    python benchmarks/run.py --only NAME --output runs/bench
    python benchmarks/run.py --torch 2.15.0 [--only NAME]...

The page is made from the JSON files of all parts, so one part can be measured alone. With a
folder, no tracked file changes. With a version, everything runs with that torch in a new virtual
environment. The JSON files lie in a folder of that torch, and the page shows its figures beside the
others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import all_reduce
import find_unused
import growth
import health
import machine
import memory
import overlap
import recording
import step_time
import tables
import tax
from goals import Goal
from plan import FULL, QUICK, Plan
from tables import Results

ROOT = Path(__file__).parent.parent


class Part(Protocol):
    """A module that measures something. Its JSON file has the results."""

    NAME: str
    TITLE: str

    def measure(self, plan: Plan) -> Results: ...
    def goals(self, results: Results) -> list[Goal]: ...
    def section(self, results: Results) -> str: ...


_OF_TORCH = "torch-"  # folders of results with another torch

PARTS: tuple[Part, ...] = (
    step_time,
    all_reduce,
    overlap,
    memory,
    find_unused,
    growth,
    tax,
    recording,
    health,
)


def _record(part: Part, plan: Plan, command: str, folder: Path) -> None:
    """Measures a part, writes its JSON file, and prints its results and the goals it misses."""
    record: Results = {"command": command, **machine.now(), **machine.describe()}
    start = time.monotonic()
    record["results"] = part.measure(plan)
    record |= {
        "minutes": round((time.monotonic() - start) / 60, 2),
        "launches": plan.step_launches if part is step_time else plan.launches,
        "smoke": plan is not FULL,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part.NAME}.json").write_text(json.dumps(_rounded(record), indent=1) + "\n")
    print(f"{part.NAME}: {record['minutes']} min\n\n{part.section(record['results'])}", flush=True)
    for goal in part.goals(record["results"]):
        if not goal.met:
            print(f"{goal.what}: {goal.found}, goal {goal.demand}", flush=True)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _page(records: dict[str, Results], others: dict[str, dict[str, Results]]) -> str:
    """The page of a run. ``others``: by version of torch, the records of its run."""
    parts = [part for part in PARTS if part.NAME in records]
    goals = _goals(records)
    text = [
        "# Benchmarks",
        "`make bench` writes this page, and overwrites changes by hand.",
        "- Contenders take turns in the same processes. Their order is shuffled in each round.\n"
        "- Each rank has one thread.\n"
        "- malloc keeps freed memory (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`), but in "
        "the memory part. Otherwise glibc returns the memory of freed gradients to the system, and "
        "a step takes up to one page fault for each 4 KiB of gradients, with the bare module, too. "
        "The number depends on the layout of the heap, which the contenders of a process share.\n"
        "- Figures are medians over the rounds of several launches, each of new processes.\n"
        "- Second copies of the bare module and of DDP show the noise of the machine (`again`).\n"
        "- A goal with an interval is met if the interval reaches the goal.",
    ]
    if any(record["smoke"] for record in records.values()):
        text.append("**A smoke run, with small models and few rounds. The figures mean nothing.**")
    text += [_origin(records), "## Goals", f"{sum(g.met for g in goals)} of {len(goals)} are met."]
    others_goals = {version: _goals(found) for version, found in others.items()}
    text.append(tables.goal_table(goals, others_goals))
    for version, found in others.items():
        met = sum(goal.met for goal in others_goals[version])
        text.append(f"With torch {version}, {met} of {len(others_goals[version])} are met.")
        text.append(_origin(found))
    for part in parts:
        text += [f"## {part.TITLE}", part.section(records[part.NAME]["results"])]
    return tables.wrapped("\n\n".join(text)) + "\n"


def _goals(records: dict[str, Results]) -> list[Goal]:
    parts = [part for part in PARTS if part.NAME in records]
    return [goal for part in parts for goal in part.goals(records[part.NAME]["results"])]


def _summary(records: dict[str, Results]) -> str:
    """The summary for README.md."""
    record = records[step_time.NAME]
    text = (
        f"On {record['cores']} cores ({record['processor']}), {record['versions']}, medians over "
        f"{record['launches']} launches, {record['date'][:10]}:\n\n"
        f"{step_time.summary(record['results'])}\n"
    )
    if memory.NAME in records:
        text += f"\n{memory.summary(records[memory.NAME]['results'])}\n"
    return text.rstrip()


def _origin(records: dict[str, Results]) -> str:
    """Machine, versions and command, and the date of each part."""
    keys = [*machine.describe(), "command"]
    found = {key: dict.fromkeys(record[key] for record in records.values()) for key in keys}
    rows = [[key, "; ".join(values)] for key, values in found.items()]
    when = [
        [name, record["date"], record["load"], record["launches"], f"{record['minutes']:.1f}"]
        for name, record in records.items()
    ]
    headers = ["part", "begun", "load average then", "launches", "minutes"]
    return tables.table(["", ""], rows) + "\n\n" + tables.table(headers, when)


def _read(folder: Path) -> dict[str, Results]:
    files = {part.NAME: folder / f"{part.NAME}.json" for part in PARTS}
    return {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}


def _run_with(torch: str, flags: list[str]) -> None:
    """Measures with another torch, and copies the JSON files."""
    sys.path.append(str(ROOT / "scripts"))
    from packages import build, installed

    (package,) = build("sdist")
    os.environ.pop("PYTHONPATH", None)  # ddpx is the installed one
    kept = ROOT / "benchmarks" / "results" / f"{_OF_TORCH}{torch}"
    with installed(package, torch, "cmake", extra="[demo]") as (python, folder):
        command = [str(python), __file__, *flags, "--output", str(folder)]
        try:
            subprocess.run(command, check=True, cwd=folder)
        finally:  # a part that fails does not lose the others
            shutil.copytree(folder / "benchmarks" / "results", kept, dirs_exist_ok=True)


def _write_page(output: Path) -> None:
    import plots  # imports matplotlib, which the ranks that import this file do not need

    results = output / "benchmarks" / "results"
    records = _read(results)
    folders = sorted(results.glob(f"{_OF_TORCH}*"))
    others = {folder.name.removeprefix(_OF_TORCH): _read(folder) for folder in folders}
    docs = output / "docs"
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "benchmarks.md").write_text(_page(records, others))
    for name, record in records.items():
        plots.draw(name, record["results"], docs / "benchmarks")
    readme = output / "README.md"
    if readme.exists() and step_time.NAME in records:
        tables.splice(readme, _summary(records))
    print(f"wrote {docs / 'benchmarks.md'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, into runs/bench")
    names = [part.NAME for part in PARTS]
    parser.add_argument("--only", choices=names, action="append", help="may be repeated")
    parser.add_argument("--output", type=Path, help="folder instead of the checkout")
    parser.add_argument("--torch", metavar="VERSION", help="use this torch in a new environment")
    arguments = parser.parse_args()
    if arguments.torch:
        _run_with(arguments.torch, [f"--only={name}" for name in arguments.only or ()])
        _write_page(ROOT)
        return
    # DDP warns in each process that no parameter was unused, which is the case that is timed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    output = arguments.output or (ROOT / "runs" / "bench" if arguments.quick else ROOT)
    flags = sys.argv[1:] if arguments.output is None else []
    command = " ".join(["python benchmarks/run.py", *flags])
    for part in PARTS:
        if part.NAME in (arguments.only or names):
            plan = QUICK if arguments.quick else FULL
            _record(part, plan, command, output / "benchmarks" / "results")
    _write_page(output)


if __name__ == "__main__":
    main()
