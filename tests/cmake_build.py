"""Builds C++ programs with CMake and runs them."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Programs of tests/torch_free, and the sanitizers under which `make test` runs them. Ranks of shm
# are processes, so most of its code has one thread. UndefinedBehaviorSanitizer would double the
# time to compile the kernels.
SANITIZED = (
    ("address", "shm_tests"),
    ("address", "shm_worker"),
    ("thread", "health_tests"),
    ("thread", "core_tests"),
)
# A sanitizer's report ends the process with an exit code of its own. Leaks are errors.
_SANITIZERS = {
    # Tests fork. The child of a process with threads only waits for its end.
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 die_after_fork=0",
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def run(
    *command: object,
    input: str | None = None,
    time_limit_s: float = 1200,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command. Return its output, or fail the test with the output."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, **_SANITIZERS, **(env or {})},
        input=input,
        timeout=time_limit_s,
    )
    assert done.returncode == 0, f"{command[0]} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


def run_suite(program: Path, *left_out: str) -> None:
    """Run a GoogleTest program without the tests that match the patterns in ``left_out``.

    Two processes have a half of the tests each, since tests often wait.
    """
    without = [f"--gtest_filter=-{':'.join(left_out)}"] if left_out else []

    def run_half(index: int) -> str:
        half = {"GTEST_TOTAL_SHARDS": "2", "GTEST_SHARD_INDEX": str(index)}
        return run(program, "--gtest_brief=1", *without, time_limit_s=300, env=half)

    with ThreadPoolExecutor(2) as threads:
        print(*threads.map(run_half, range(2)))


@functools.cache
def build(source: Path, name: str, target: str, *definitions: str) -> Path:
    """Build ``target`` of ``source`` in ``build-NAME``, once per process.

    Return the program's path.
    """
    directory = ROOT / f"build-{name}"
    directory.mkdir(exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may run the same build
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


def build_cpp_suite() -> Path:
    """Build the tests of tests/cpp.

    They use the extension's own objects if these are up to date, so that tests run the same code as
    users.
    """
    definitions = (f"Python_EXECUTABLE={sys.executable}", "DDPX_PREBUILT=ON")
    return build(ROOT, "cpp", "ddpx_tests", *definitions)


def build_torch_free(sanitizers: str, target: str) -> Path:
    """Build a program of tests/torch_free.

    Args:
        sanitizers: The value of DDPX_SANITIZE.
        target: ``shm_tests``, ``health_tests``, ``core_tests`` or ``shm_worker``.
    """
    name = "-".join(["torch_free", *filter(None, sanitizers.split(","))])
    definitions = (f"DDPX_SANITIZE={sanitizers}", f"Python_EXECUTABLE={sys.executable}")
    return build(ROOT / "tests" / "torch_free", name, target, *definitions)


def _tool(name: str) -> str:
    """Return the path of a program, preferably from this interpreter's environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} was not found; pip install {name}")
    return found
