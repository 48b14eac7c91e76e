"""The C++ tests of csrc/health: plain, and under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Reports end the process with an error code of their own. Leaks count.
ENV = {
    # Tests fork; the child of a process with threads only waits for its end.
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 die_after_fork=0",
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def _tool(name: str) -> str:
    """Return the program of that name, this interpreter's own environment first."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} was not found; pip install {name}")
    return found


def _run(*command: object) -> str:
    """Run a command and return its output, which is the report if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, **ENV},
    )
    assert done.returncode == 0, f"{command[0]} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.mark.timeout(1800)  # a first build under a sanitizer takes some minutes on 2 cores
@pytest.mark.parametrize("sanitizers", ["", "thread", "address,undefined"])
def test_health_core(sanitizers: str) -> None:
    name = "build-health" + (f"-{sanitizers.split(',')[0]}" if sanitizers else "")
    configured = _run(
        _tool("cmake"),
        *("-S", ROOT / "tests" / "health", "-B", ROOT / name, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        f"-DDDPX_SANITIZE={sanitizers}",
    )
    if "apt install libgtest-dev" in configured:
        pytest.skip("GoogleTest was not found; apt install libgtest-dev")
    jobs = os.environ.get("MAX_JOBS")
    _run(_tool("cmake"), "--build", ROOT / name, *(["--parallel", jobs] if jobs else []))
    print(_run(ROOT / name / "health_tests", "--gtest_brief=1"))
