"""Builds, tests and measures on a machine with a CUDA GPU, and writes the results as JSON.

    make gpu                                     # all parts, in at most 10 minutes
    python3 scripts/gpu.py --parts build step    # some parts
    python3 scripts/gpu_report.py runs/gpu.json  # writes the README's table afterwards

The Python that runs this script needs torch 2.11 to 2.15, setuptools and ninja, and pytest for the
tests. With pytest-xdist, several tests run at once. The script installs nothing. It rewrites the
file after each part, so that an interrupted run keeps its results. After a failed part the other
parts still run, except after a failed build. The file has the errors.

Part ``sanitizer`` repeats the device tests under TORCH_CUDA_SANITIZER=1, torch's check for accesses
that no stream wait or event orders. It runs a part of large matrices, since the check slows down
every operator. Each Python process reads the variable when it imports torch, so spawned ranks have
it, too. The check covers operators that go through torch's dispatcher, also in the reducer's hooks,
but not the kernels of NCCL.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
TOTAL_S = 570.0
# Time limit in s of each part, in order of running. The last part gets all remaining time.
LIMITS_S = {
    "build": 180.0,
    "tests": 220.0,
    "step": 90.0,
    "graph": 60.0,
    "shared_step": 60.0,
    "sanitizer": 1000.0,
}
_TEXT_BYTES = 4000  # size of the output that is kept of a failed part
_MOST_PROCESSES = 8  # each one has up to 14 ranks on the GPU
_MAX_FAILURES = 40  # number of failures that are kept with their text
Part = dict[str, Any]


def _run(
    command: list[str], limit_s: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Runs a command in a process group of its own, and ends the group afterwards.

    Returns:
        The exit code, or None if the time limit ended the command; and the output.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **_environment(), **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ends ranks that outlive the command
            process.wait()
        output.seek(0)
        return code, output.read()


def _environment() -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # cuBLAS sums in a fixed order only with this workspace.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def _status(code: int | None) -> str:
    return "timed out" if code is None else "passed" if code == 0 else "failed"


def _build(arguments: argparse.Namespace, limit_s: float) -> Part:
    code, output = _run([sys.executable, "scripts/build.py"], limit_s)
    return {"status": _status(code), "error": "" if code == 0 else output[-_TEXT_BYTES:]}


_OUTCOMES = ("passed", "failed", "error", "skipped")


# ---- tests ---------------------------------------------------------------------------------------


def _group(test: str) -> str:
    """The group of a test, by the ranks in its params.

    The same code runs over each kind of ranks.
    """
    match = re.search(r"\bcuda-(nccl|gloo)-(\d+)\b", test)
    if not match:
        return "others"
    return f"{match[1]}, {match[2]} {'rank' if match[2] == '1' else 'ranks'}"


def summarize_tests(lines: list[dict[str, Any]], code: int | None, output: str) -> Part:
    """The results of a run of pytest, from the log of its plugin."""
    ended = {line["id"]: line for line in lines if line["outcome"] in _OUTCOMES}
    started = [line["id"] for line in lines if line["outcome"] == "started"]
    groups: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, line in ended.items():
        groups[_group(name)][line["outcome"]] += 1
    wrong = [line for line in ended.values() if line["outcome"] in ("failed", "error")]
    skipped = [line["text"] for line in ended.values() if line["outcome"] == "skipped"]
    counts = collections.Counter(line["outcome"] for line in ended.values())
    part: Part = {
        "status": _status(code),
        # Each process of pytest-xdist collects all tests.
        "collected": max(
            (line["number"] for line in lines if line["outcome"] == "collected"), default=0
        ),
        "counts": {outcome: counts[outcome] for outcome in _OUTCOMES},
        "groups": {name: dict(group) for name, group in sorted(groups.items())},
        "failures": [{"id": line["id"], "text": line["text"]} for line in wrong[:_MAX_FAILURES]],
        "skips": dict(collections.Counter(skipped)),
        "sanitizer_reports": output.count("CSAN detected"),
        "error": "",
    }
    if code is None:
        part["unfinished"] = [name for name in started if name not in ended]
    if code not in (0, None) and not wrong:  # 5: no test was collected
        part["error"] = output[-_TEXT_BYTES:]
    if code == 0 and not counts["passed"]:
        part |= {"status": "failed", "error": "every test was skipped"}
    return part


def _tests(arguments: argparse.Namespace, limit_s: float, sanitizer: bool = False) -> Part:
    with tempfile.TemporaryDirectory(prefix="ddpx-gpu-") as directory:
        log = Path(directory) / "tests.jsonl"
        log.touch()
        command = [sys.executable, "-m", "pytest", "-p", "gpu_pytest", "-q", "-m", "gpu"]
        # A module whose requirements are not installed here must not stop the others.
        command += ["--continue-on-collection-errors", "-p", "no:cacheprovider", *arguments.tests]
        if importlib.util.find_spec("xdist"):
            num_cores = len(os.sched_getaffinity(0))
            command += ["--numprocesses", str(min(max(1, num_cores // 2), _MOST_PROCESSES))]
        environment = {"GPU_PYTEST_LOG": str(log)}
        if sanitizer:
            environment["TORCH_CUDA_SANITIZER"] = "1"
        elif not arguments.tests:
            command.append("--full")
        code, output = _run(command, limit_s, environment)
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    return summarize_tests(lines, code, output)


def _sanitizer(arguments: argparse.Namespace, limit_s: float) -> Part:
    return _tests(arguments, limit_s, sanitizer=True)


# ---- measurements --------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace, limit_s: float, *options: str) -> Part:
    """One run of benchmarks/gpu_step.py, which adapts its effort to its time limit."""
    with tempfile.TemporaryDirectory(prefix="ddpx-gpu-") as directory:
        figures = Path(directory) / "figures.json"
        command = [sys.executable, "benchmarks/gpu_step.py", "--device", arguments.device]
        command += ["--limit-s", f"{limit_s - 5:.0f}", "--json", str(figures), *options]
        code, output = _run(command + (["--tiny"] if arguments.tiny else []), limit_s)
        results = json.loads(figures.read_text()) if figures.exists() else {}
    error = "" if code == 0 else output[-_TEXT_BYTES:]
    return {"status": _status(code), "error": error, "results": results}


def _step(arguments: argparse.Namespace, limit_s: float) -> Part:
    return _measure(arguments, limit_s, "--ranks", "1", "--what", "time", "counts", "overlap")


def _graph(arguments: argparse.Namespace, limit_s: float) -> Part:
    return _measure(arguments, limit_s, "--ranks", "1", "--what", "graph")


def _shared_step(arguments: argparse.Namespace, limit_s: float) -> Part:
    return _measure(arguments, limit_s, "--ranks", "2", "--what", "time", "counts", "overlap")


PARTS: dict[str, Callable[[argparse.Namespace, float], Part]] = {
    "build": _build,
    "tests": _tests,
    "step": _step,
    "graph": _graph,
    "shared_step": _shared_step,
    "sanitizer": _sanitizer,
}


# ---- the machine ---------------------------------------------------------------------------------


def sources_digest() -> str:
    """A digest of all files that are built and measured.

    Identifies the sources of a result without git.
    """
    digest = hashlib.sha256()
    folders = ("csrc", "ddpx", "benchmarks", "scripts", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    for path in sorted([*files, ROOT / "setup.py"]):
        if path.suffix in (".cpp", ".h", ".py"):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> str:
    """The commit, with "+" if files have changed since. "unknown" without git."""
    try:
        options: Any = {"cwd": ROOT, "text": True, "stderr": subprocess.DEVNULL, "timeout": 10}
        commit = subprocess.check_output(["git", "rev-parse", "--short=10", "HEAD"], **options)
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], **options)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return str(commit).strip() + ("+" if changed else "")


def _machine(device: str) -> dict[str, Any]:
    import torch

    about: dict[str, Any] = {
        "kind": device,
        "device": "CPU",
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


def _summary(name: str, part: Part) -> str:
    counts = part.get("counts")
    text = ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) if counts else ""
    return f"{name}: {part['status']} in {part['seconds']:.0f} s" + (f" ({text})" if text else "")


def _write(record: dict[str, Any], out: Path) -> None:
    """Writes the file atomically, so that a reader always finds a complete file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1))
    draft.replace(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu.json")
    parser.add_argument(
        "--total-s", type=float, default=TOTAL_S, help="time limit of all parts in s"
    )
    parser.add_argument(
        "--tests", nargs="+", default=[], help="only the device tests in these files"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for a trial"
    )
    parser.add_argument("--tiny", action="store_true", help="small models, for a trial")
    arguments = parser.parse_args()
    reason = _why_not(arguments.device)
    if reason:
        print(f"gpu: {reason}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "sources": sources_digest(),
        "machine": _machine(arguments.device),
        "parts": {name: {"status": "not run"} for name in PARTS},
    }
    for name in PARTS:
        if name not in arguments.parts:
            continue
        left_s = arguments.total_s - (time.monotonic() - begin)
        if left_s < 10:
            record["parts"][name] = {"status": "not run", "error": "no time was left"}
            continue
        print(f"{name} ...", flush=True)
        start = time.monotonic()
        part = PARTS[name](arguments, min(LIMITS_S[name], left_s))
        record["parts"][name] = {**part, "seconds": round(time.monotonic() - start, 1)}
        print(_summary(name, record["parts"][name]), flush=True)
        _write(record, arguments.out)
        if name == "build" and part["status"] != "passed":
            print(part["error"], flush=True)
            break
    _write(record, arguments.out)
    print(f"written to {arguments.out}")
    ran = [part["status"] for name, part in record["parts"].items() if name in arguments.parts]
    return 0 if all(status == "passed" for status in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
