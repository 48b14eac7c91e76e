"""The C++ tests of parts that do not use torch, under sanitizers. With --full also without."""

from __future__ import annotations

import pytest
from cmake_build import build_torch_free, run_suite

SUITES = ("shm_tests", "health_tests", "core_tests")
# The short run has one set of sanitizers for each suite. Ranks of shm are processes, so most of its
# code has one thread. UndefinedBehaviorSanitizer would double the time to compile the kernels.
# tests/shm/test_shm_gloo.py uses the same build as shm_tests.
SHORT = [
    ("address", "shm_tests"),
    ("thread", "health_tests"),
    ("thread", "core_tests"),
]
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
