"""Builds and runs the C++ tests, so that pytest alone runs every test of ddpx."""

from __future__ import annotations

import sys

import pytest
from cmake_build import ROOT, build, run_suite


@pytest.mark.timeout(900)  # a first build compiles for about 2 minutes
def test_cpp_suite() -> None:
    run_suite(build(ROOT, "cpp", f"Python_EXECUTABLE={sys.executable}") / "ddpx_tests")
