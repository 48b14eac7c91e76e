"""The C++ tests of what knows nothing of torch, under sanitizers; with --full plain, too."""

from __future__ import annotations

import pytest
from cmake_build import build_torch_free, run_suite

SUITES = ("shm_tests", "health_tests", "core_tests")
# Memory is most at risk where ranks share it, other state where threads do. With checks for
# undefined behaviour, too, shm_tests would compile half as long again.
SHORT = [("address", "shm_tests"), *(("thread", suite) for suite in SUITES)]
FULL = [(sanitizers, suite) for sanitizers in ("address,undefined", "") for suite in SUITES]


@pytest.mark.timeout(1800)  # a first build under a sanitizer takes some minutes on 2 cores
@pytest.mark.parametrize(
    "sanitizers, suite",
    [*SHORT, *(pytest.param(*row, marks=pytest.mark.full_only) for row in FULL)],
)
def test_torch_free(sanitizers: str, suite: str, whole: bool) -> None:
    left_out = []
    if sanitizers == "thread":
        left_out.append("*KernelsTest.*")  # which have no threads
        if not whole:
            left_out.append("*OperationsTest.*/7*")  # ranks, which take almost half of the time
    run_suite(build_torch_free(sanitizers, suite), *left_out)
