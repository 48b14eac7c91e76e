"""The C++ tests of what knows nothing of torch, under sanitizers; with --full plain, too."""

from __future__ import annotations

import pytest
from cmake_build import build_torch_free, run_suite

SUITES = ("shm_tests", "health_tests", "core_tests")
# Memory is most at risk where ranks share it, other state where threads do.
SHORT = {("address,undefined", "shm_tests"), *(("thread", suite) for suite in SUITES)}


@pytest.mark.timeout(1800)  # a first build under a sanitizer takes some minutes on 2 cores
@pytest.mark.parametrize(
    "sanitizers, suite",
    [
        pytest.param(*row, marks=() if row in SHORT else pytest.mark.full_only)
        for sanitizers in ("address,undefined", "thread", "")
        for row in ((sanitizers, suite) for suite in SUITES)
    ],
)
def test_torch_free(sanitizers: str, suite: str) -> None:
    run_suite(build_torch_free(sanitizers, suite))
