"""Builds tests/shm with CMake, once per process and sanitizer."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> str:
    """Return the program of that name, this interpreter's own environment first."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} was not found; pip install {name}")
    return found


def run(*command: object, env: dict[str, str] | None = None, **options: str) -> str:
    """Run a command and return its output, which is the report if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, **(env or {})},
        input=options.get("input"),
    )
    assert done.returncode == 0, f"{command[0]} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


@functools.cache
def build(sanitizers: str = "") -> Path:
    """Build everything with these sanitizers, and return the build directory."""
    name = "build-shm" + (f"-{sanitizers.split(',')[0]}" if sanitizers else "")
    directory = ROOT / name
    configured = run(
        tool("cmake"),
        *("-S", ROOT / "tests" / "shm", "-B", directory, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DDDPX_SANITIZE={sanitizers}",
    )
    jobs = os.environ.get("MAX_JOBS")
    run(tool("cmake"), "--build", directory, *(["--parallel", jobs] if jobs else []))
    if not (directory / "shm_tests").exists():
        assert "apt install libgtest-dev" in configured
        pytest.skip("GoogleTest was not found; apt install libgtest-dev")
    return directory
