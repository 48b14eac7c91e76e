"""Builds C++ with CMake, and runs it."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Reports end the process with an error code of their own. Leaks count.
_SANITIZERS = {
    # Tests fork; the child of a process with threads only waits for its end.
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 die_after_fork=0",
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def run(*command: object, input: str | None = None, time_limit_s: float = 1200) -> str:
    """Run a command and return its output, which is the report if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, **_SANITIZERS},
        input=input,
        timeout=time_limit_s,
    )
    assert done.returncode == 0, f"{command[0]} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


def run_suite(program: Path, *left_out: str) -> None:
    """Run a program of GoogleTest, without the tests that fit one of these patterns."""
    without = [f"--gtest_filter=-{':'.join(left_out)}"] if left_out else []
    print(run(program, "--gtest_brief=1", *without, time_limit_s=300))


@functools.cache
def build(source: Path, name: str, target: str, *definitions: str) -> Path:
    """Build ``target`` of ``source`` in ``build-NAME``, once a process; return what was built."""
    directory = ROOT / f"build-{name}"
    directory.mkdir(exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of tests may build it, too
        run(
            *(_tool("cmake"), "-S", source, "-B", directory, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
            *(f"-D{definition}" for definition in definitions),
        )
        cache = (directory / "CMakeCache.txt").read_text()
        if target.endswith("_tests") and "GTest_DIR-NOTFOUND" in cache:
            pytest.skip("GoogleTest was not found; apt install libgtest-dev")
        jobs = os.environ.get("MAX_JOBS")
        run(
            *(_tool("cmake"), "--build", directory, "--target", target),
            *(["--parallel", jobs] if jobs else []),
        )
    return directory / target


def build_torch_free(sanitizers: str, target: str) -> Path:
    """Build one of what knows nothing of torch: ``shm_tests``, ``health_tests``, ``core_tests``,
    ``shm_worker``."""
    name = "-".join(["torch_free", *filter(None, sanitizers.split(","))])
    return build(ROOT / "tests" / "torch_free", name, target, f"DDPX_SANITIZE={sanitizers}")


def _tool(name: str) -> str:
    """Return the program of that name, this interpreter's own environment first."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} was not found; pip install {name}")
    return found
