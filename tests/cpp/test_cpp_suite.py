"""Builds and runs the C++ tests, so that pytest alone runs every test of ddpx."""

from __future__ import annotations

import sys

import pytest
from cmake_build import ROOT, build, run_suite


@pytest.mark.timeout(900)  # a first build compiles for 1 or 2 minutes
def test_cpp_suite() -> None:
    """Of the code that users run: the extension's own objects, if they are up to date."""
    definitions = (f"Python_EXECUTABLE={sys.executable}", "DDPX_PREBUILT=ON", "DDPX_UNITY=ON")
    run_suite(build(ROOT, "cpp", "ddpx_tests", *definitions))
