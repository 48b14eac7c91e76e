"""Builds and runs the C++ tests, so that pytest alone runs every test of ddpx."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build-cpp"


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
    )
    assert done.returncode == 0, f"{command[0]} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.mark.timeout(900)  # a first build compiles for about 2 minutes
def test_cpp_suite() -> None:
    cmake, ninja = _tool("cmake"), _tool("ninja")
    configured = _run(
        cmake,
        *("-S", ROOT, "-B", BUILD, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    if "apt install libgtest-dev" in configured:
        pytest.skip("GoogleTest was not found; apt install libgtest-dev")
    jobs = os.environ.get("MAX_JOBS")
    _run(cmake, "--build", BUILD, *(["--parallel", jobs] if jobs else []))
    print(_run(BUILD / "ddpx_tests"))
