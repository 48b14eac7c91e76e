"""Builds the C++ programs of the tests, so that no test waits for a compiler.

    python scripts/build_tests.py

The programs are those of `make test`: the C++ suites, the late device, and a benchmark.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import health
import late_device  # type: ignore[import-not-found]
import pytest
from cmake_build import (  # type: ignore[import-not-found]
    SANITIZED,
    build_cpp_suite,
    build_torch_free,
)


def main() -> None:
    start = time.monotonic()
    late_device.build()
    builds: list[Callable[[], object]] = [build_cpp_suite, health.build_program]
    builds += [functools.partial(build_torch_free, *row) for row in SANITIZED]
    for build in builds:
        try:
            build()
        except pytest.skip.Exception as reason:
            print(f"a program is left out: {reason}")
    print(f"built the programs of the tests in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
