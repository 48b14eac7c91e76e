"""The C++ tests of parts that do not use torch, under sanitizers. With --full also without."""

from __future__ import annotations

import pytest
from cmake_build import SANITIZED, build_torch_free, run_suite

SUITES = ("shm_tests", "health_tests", "core_tests")
# The short run has one set of sanitizers for each suite.
SHORT = [row for row in SANITIZED if row[1] in SUITES]
FULL = [
    (sanitizers, suite)
    for sanitizers in ("thread", "address,undefined", "")
    for suite in SUITES
    if (sanitizers, suite) not in SHORT
]


@pytest.mark.timeout(1800)  # a first build under a sanitizer takes some minutes on 2 cores
@pytest.mark.parametrize(
    "sanitizers, suite",
    [*SHORT, *(pytest.param(*row, marks=pytest.mark.full_only) for row in FULL)],
)
def test_torch_free(sanitizers: str, suite: str, whole: bool) -> None:
    left_out = []
    if sanitizers == "thread":
        left_out.append("*KernelsTest.*")  # the kernels have no threads
    if not whole:
        # the cases with the most ranks take almost half of the time
        left_out.append("*OperationsTest.*/7*")
    run_suite(build_torch_free(sanitizers, suite), *left_out)
