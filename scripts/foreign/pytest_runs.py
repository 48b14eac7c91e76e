"""Runs test files by pytest in the environment of a suite."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from outcomes import Outcome

from foreign import processes
from foreign.environments import Environment

_FIELDS = {field.name for field in fields(Outcome)}


def run(
    environment: Environment,
    contestant: str,
    folder: Path,
    files: Sequence[str],
    limit_s: float,
    extra: Mapping[str, str] | None = None,
    words: Sequence[str] = (),
) -> dict[str, Outcome]:
    """Runs all tests of some files.

    A test that ends its process, or exceeds its time limit, fails. A new process runs the tests
    after it.

    Args:
        environment: The environment, which has pytest and pytest-timeout.
        contestant: The class, "torch" or "ddpx".
        folder: The folder of the files.
        files: The files.
        limit_s: The time limit of a test, in s.
        extra: Further environment variables.
        words: Further arguments of pytest.
    """
    results = environment.folder / f"{contestant}.jsonl"
    log, built = results.with_suffix(".log"), results.with_suffix(".built")
    for file in (results, log, built):
        file.unlink(missing_ok=True)
    command = [str(environment.python), "-m", "pytest", "-q", "-p", "foreign_pytest"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["--timeout", str(limit_s), "--timeout-method", "thread", *words]
    command += [str(folder / name) for name in files]
    env = processes.variables(contestant, built, {"FOREIGN_RESULTS": str(results), **(extra or {})})
    while True:
        start = time.monotonic()
        # Not in the folder of the files: python -m would import its modules by their short names.
        code = processes.run(command, env, log, environment.folder, limit_s=3600)
        lines = _lines(results)
        if code in (0, 1) and lines and not unfinished(lines):
            return outcomes(lines)
        if (name := unfinished(lines)) is None:
            return outcomes(lines) | {"pytest": _no_tests(log)}
        is_late = f"Timeout (>{limit_s}s)" in log.read_text(errors="replace")[-20_000:]
        outcome = Outcome("timeout", f"over {limit_s} s") if is_late else _crash(code)
        outcome.seconds = round(time.monotonic() - start, 1)
        with results.open("a") as lines_of_tests:
            lines_of_tests.write(json.dumps({"test": name, **outcome.to_json()}) + "\n")


def _lines(results: Path) -> list[dict[str, Any]]:
    text = results.read_text() if results.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _crash(code: int | None) -> Outcome:
    return Outcome("crash", f"the process ended with {code}")


def _no_tests(log: Path) -> Outcome:
    text = log.read_text(errors="replace") if log.exists() else ""
    return Outcome("crash", processes.error_in(text) or "pytest ran no test", details=text[-4000:])


def unfinished(lines: Iterable[Mapping[str, Any]]) -> str | None:
    """The test that began last, if it has no outcome."""
    running = None
    for line in lines:
        if "started" in line:
            running = line["started"]
        elif line["test"] == running:
            running = None
    return running


def outcomes(lines: Iterable[Mapping[str, Any]]) -> dict[str, Outcome]:
    """The outcomes by test. A test that failed has the error at the end of its traceback."""
    found = {}
    for line in lines:
        if "test" not in line:
            continue
        outcome = Outcome(**{name: value for name, value in line.items() if name in _FIELDS})
        if outcome.status == "fail":
            outcome.reason = _short(outcome)
        found[line["test"].replace(".py::", "::")] = outcome
    return found


def _short(outcome: Outcome) -> str:
    """An error in one line. An error of a child process is quoted in the error of its parent."""
    if outcome.reason.startswith("RuntimeError: Process "):
        return processes.error_in(outcome.reason) or outcome.reason.splitlines()[0]
    return (outcome.reason.splitlines() or [""])[0]
