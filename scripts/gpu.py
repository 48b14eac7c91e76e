"""Builds, measures and tests on a machine with a CUDA GPU: what benchmarks/results/gpu.json lacks.

    make gpu                                             # what is missing, in at most 9 minutes
    python3 scripts/gpu.py --out FILE                    # leaves the committed file as it is
    python3 scripts/gpu.py --merge FILE                  # takes the newer results of FILE
    python3 scripts/gpu.py --status                      # what is missing; needs no GPU
    python3 scripts/gpu.py --collect                     # adds the tests without a result
    python3 scripts/gpu.py --parts tests --tests parity  # tests with "parity" in their id, again
    python3 scripts/gpu_report.py                        # writes docs/gpu.md and README.md

The Python that runs this script needs torch 2.11 to 2.15, setuptools and ninja, and pytest for the
tests. The script installs nothing. It writes the file every few seconds, so that an interrupted run
keeps its results. docs/gpu.md says what runs first.

Part ``sanitizer`` repeats tests under TORCH_CUDA_SANITIZER=1, torch's check for accesses that no
stream wait or event orders. Each Python process reads the variable when it imports torch. The
check covers operators that go through torch's dispatcher, also in the reducer's hooks, but not the
kernels of NCCL.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gpu_command import ROOT, run
from gpu_order import in_order, sanitized
from gpu_parts import PARTS, measure, needs, outcome
from gpu_results import NEWER, NO_TIME, TABLES, Results, Row, State, load
from gpu_sources import digest_of_test, sources_digest
from gpu_workers import Workers, collect

RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
TOTAL_S = 540.0
_BUILD_S = 240.0  # time limit of the build
_LEAST_S = 20.0  # nothing starts with less time left
_SAVE_S = 3.0  # time between two writes of the file
_MOST_WORKERS = 8
_WORKER_BYTES = 9 * 2**30  # GPU memory of one test process, with 4 to 8 ranks
States = Collection[State]
NAMES = ("build", *PARTS, "tests", "sanitizer")


class Session:
    """One run of this script: its time limit, and the results that it adds to."""

    def __init__(self, arguments: argparse.Namespace, results: Results) -> None:
        self.arguments, self.results = arguments, results
        self.out: Path = arguments.out or arguments.results
        self.failures = 0
        self._deadline = time.monotonic() + arguments.total_s
        self._save_time = 0.0
        now = datetime.datetime.now(datetime.timezone.utc)
        self.name = f"{now:%Y-%m-%dT%H:%M} {arguments.commit or _commit()}"
        results.runs[self.name] = _machine(arguments.device)

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def put(self, table: str, name: str, row: Row, digest: str) -> None:
        """Adds a result, and writes the file if the last write is some seconds ago."""
        row = {key: value for key, value in row.items() if value != ""}
        if "text" in row:
            row["text"] = _without_folders(row["text"])
        row |= {"seconds": round(row["seconds"], 1), "run": self.name, "sources": digest}
        self.results.tables[table][name] = row
        if row["outcome"] == "failed":
            self.failures += 1
            print(f"failed: {name}\n{row.get('text', '')[-500:]}", flush=True)
        if time.monotonic() > self._save_time:
            self.save()

    def save(self) -> None:
        self.results.save(self.out)
        self._save_time = time.monotonic() + _SAVE_S


def _without_folders(text: str) -> str:
    """The text without the folders of this machine."""
    return re.sub(r"/[^\s\"]*/site-packages/", "", text).replace(f"{ROOT}/", "")


def _commit() -> str:
    """The commit, with "+" if files have changed since. "unknown" without git."""
    try:
        options: Any = {"cwd": ROOT, "text": True, "stderr": subprocess.DEVNULL, "timeout": 10}
        commit = subprocess.check_output(["git", "rev-parse", "--short=7", "HEAD"], **options)
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], **options)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return str(commit).strip() + ("+" if changed else "")


def _machine(device: str) -> dict[str, Any]:
    import torch

    about: dict[str, Any] = {
        "kind": device,
        "device": "CPU",
        "device_count": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {
            "device": properties.name,
            "device_count": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        }
    return about


def _why_not(device: str) -> str | None:
    """The reason why nothing can run here, or None."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch ({error}); choose one that has: make gpu PYTHON=..."
    if device == "cuda" and not torch.cuda.is_available():
        return f"no CUDA device here (torch {torch.__version__}); nothing was run"
    return None


def build(session: Session) -> bool:
    start = time.monotonic()
    row = outcome(*run([sys.executable, "scripts/build.py"], min(_BUILD_S, session.left_s)))
    row["seconds"] = time.monotonic() - start
    session.put("parts", "build", row, "")
    print(f"build: {row['outcome']} in {row['seconds']:.0f} s", flush=True)
    return bool(row["outcome"] == "passed")


def measure_parts(session: Session, states: States) -> None:
    for name, part in PARTS.items():
        limit_s = min(part.limit_s, session.left_s)
        state = session.results.state("parts", name, sources_digest(part.script))
        if name not in session.arguments.parts or state not in states or limit_s < _LEAST_S:
            continue
        start = time.monotonic()
        if part.num_gpus > session.results.runs[session.name]["device_count"]:
            row: Row = {"outcome": "skipped", "text": needs(part)}
        else:
            row = measure(part, session.arguments.device, session.arguments.tiny, limit_s)
        row["seconds"] = time.monotonic() - start
        session.put("parts", name, row, sources_digest(part.script))
        print(f"{name}: {row['outcome']} in {row['seconds']:.0f} s", flush=True)


def run_tests(session: Session, table: str, tests: list[str]) -> None:
    """Runs tests in the order of the list, in all processes, until the time limit."""
    if not tests or session.left_s < _LEAST_S:
        return
    counts: collections.Counter[str] = collections.Counter()

    def report(test: str, result: dict[str, Any]) -> None:
        counts[result["outcome"]] += 1
        session.put(table, test, result, digest_of_test(test))

    extra = {"TORCH_CUDA_SANITIZER": "1"} if table == "sanitizer" else {}
    start = time.monotonic()
    error = Workers(tests, _num_workers(session), report, extra).run(session.left_s)
    session.save()
    if error:
        session.failures += 1
    done = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    took_s = time.monotonic() - start
    print(f"{table}: {done or 'none'} of {len(tests)} in {took_s:.0f} s\n{error}", flush=True)


def _num_workers(session: Session) -> int:
    if session.arguments.workers:
        return int(session.arguments.workers)
    machine = session.results.runs[session.name]
    by_memory = machine.get("memory_bytes", 2**40) // _WORKER_BYTES
    return int(max(1, min(machine["cores"] // 2, by_memory, _MOST_WORKERS)))


def expect_tests(results: Results, reason: str) -> tuple[list[str], set[str], dict[str, str]]:
    """Adds a row for each test of the selection without a result.

    Returns:
        All tests, those of the selection, and the errors of files that pytest cannot import.
    """
    every, short, errors = collect()
    for table, of_table in (("tests", list), ("sanitizer", sanitized)):
        results.expect(
            table,
            set(of_table(short)),
            set(of_table(every)),
            is_complete=not errors,
            reason=reason,
        )
    return every, set(short), errors


def collect_tests(session: Session) -> tuple[list[str], set[str]]:
    """Returns all tests, and those of the selection, which get a row in the file."""
    every, short, errors = expect_tests(session.results, NO_TIME)
    for file, text in errors.items():
        session.put("tests", file, {"outcome": "failed", "text": text, "seconds": 0.0}, "")
    session.save()
    return every, short


def run_missing(session: Session, every: list[str], short: set[str], states: States) -> None:
    """Runs what is in one of these states: failed tests, parts, selection, sanitizer, others."""
    parts, results = session.arguments.parts, session.results
    order = in_order(every, results, "tests", states)
    if "tests" in parts:
        rows = results.tests
        run_tests(
            session, "tests", [t for t in order if rows.get(t, {}).get("outcome") == "failed"]
        )
    measure_parts(session, states)
    order = in_order(every, results, "tests", states)
    if "tests" in parts:
        run_tests(session, "tests", [test for test in order if test in short])
    if "sanitizer" in parts:
        run_tests(session, "sanitizer", in_order(sanitized(short), results, "sanitizer", states))
    if "tests" in parts:
        run_tests(session, "tests", [test for test in order if test not in short])


def status(results: Results) -> str:
    """How many results there are, of these sources, of older sources, and missing."""
    lines = []
    for table in TABLES:
        counts: collections.Counter[str] = collections.Counter()
        names = list(PARTS) if table == "parts" else list(results.tables[table])
        for name in names:
            part = PARTS.get(name)
            digest = sources_digest(part.script) if part else digest_of_test(name)
            counts[results.state(table, name, digest)] += 1
        lines.append(
            f"{table}: {counts['current']} of these sources, {counts['older']} of older sources, "
            f"{counts['missing']} missing or failed"
        )
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=NAMES, default=NAMES)
    add("--results", type=Path, default=RESULTS, help="the results so far")
    add("--out", type=Path, help="the file that is written; default: --results")
    add("--merge", type=Path, metavar="FILE", help="take the newer results of FILE, run nothing")
    add("--status", action="store_true", help="print what is missing, run nothing")
    add("--collect", action="store_true", help="add the tests without a result, run nothing")
    add("--total-s", type=float, default=TOTAL_S, help="time limit in s, with the build")
    add(
        "--tests",
        nargs="+",
        default=[],
        help="tests, by regular expressions, again",
    )
    add("--changed", action="store_true", help="do not put results of older sources last")
    add("--commit", help="the commit of the sources; default: of git")
    add("--workers", type=int, help="number of test processes")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a trial")
    add("--tiny", action="store_true", help="small models, for a trial")
    return parser.parse_args()


def main() -> int:
    arguments = _parse()
    results = load(arguments.results) if arguments.results.exists() else Results()
    if arguments.merge:
        results.merge(load(arguments.merge))
        results.save(arguments.out or arguments.results)
    if arguments.collect:
        _, _, errors = expect_tests(results, NEWER)
        if errors:
            print(*errors.values(), sep="\n", file=sys.stderr)
            return 1
        results.save(arguments.out or arguments.results)
    if arguments.merge or arguments.status or arguments.collect:
        print(status(results))
        return 0
    reason = _why_not(arguments.device)
    if reason:
        print(f"gpu: {reason}", file=sys.stderr)
        return 2
    session = Session(arguments, results)
    # An ended run leaves no ranks on the GPU, and its file has all results.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        if "build" in arguments.parts and not build(session):
            return 1
        every: list[str] = []
        short: set[str] = set()
        if {"tests", "sanitizer"} & set(arguments.parts):
            every, short = collect_tests(session)
        if arguments.tests:
            patterns = [re.compile(text) for text in arguments.tests]
            named = [test for test in every if any(each.search(test) for each in patterns)]
            run_tests(session, "tests", named)
        else:
            rounds: list[States] = [{"missing"}, {"older"}]
            if arguments.changed:
                rounds = [{"missing", "older"}]
            for states in rounds:
                run_missing(session, every, short, states)
    finally:
        session.save()
        print(f"written to {session.out}\n{status(results)}", flush=True)
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
