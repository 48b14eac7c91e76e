"""Builds and runs the C++ tests, so that pytest alone runs all tests of ddpx."""

from __future__ import annotations

import sys

import pytest
from cmake_build import ROOT, build, run_suite


@pytest.mark.timeout(900)  # a first build takes 1 or 2 minutes
def test_cpp_suite() -> None:
    """Uses the extension's own objects if they are up to date, so that tests run the same code
    as users."""
    definitions = (f"Python_EXECUTABLE={sys.executable}", "DDPX_PREBUILT=ON", "DDPX_UNITY=ON")
    run_suite(build(ROOT, "cpp", "ddpx_tests", *definitions))
