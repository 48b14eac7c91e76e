"""The C++ tests of the shared-memory transport: plain, and under sanitizers."""

from __future__ import annotations

import pytest
from shm_build import build, run

# Reports end the process with an error code of their own. Leaks count.
ENV = {
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@pytest.mark.timeout(1800)  # a first build under a sanitizer takes some minutes on 2 cores
@pytest.mark.parametrize("sanitizers", ["", "thread", "address,undefined"])
def test_shm_core(sanitizers: str) -> None:
    print(run(build(sanitizers) / "shm_tests", "--gtest_brief=1", env=ENV))
