"""The C++ tests of what knows nothing of torch, under sanitizers; with --full plain, too."""

from __future__ import annotations

import pytest
from cmake_build import build_torch_free, run_suite


@pytest.mark.timeout(1800)  # a first build under a sanitizer takes some minutes on 2 cores
@pytest.mark.parametrize("suite", ["shm_tests", "health_tests", "core_tests"])
@pytest.mark.parametrize(
    "sanitizers", ["address,undefined", "thread", pytest.param("", marks=pytest.mark.full_only)]
)
def test_torch_free(sanitizers: str, suite: str) -> None:
    run_suite(build_torch_free(sanitizers) / suite)
