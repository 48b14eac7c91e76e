"""Builds and runs the C++ tests, so that pytest alone runs all tests of ddpx."""

from __future__ import annotations

import sys

import pytest
from cmake_build import ROOT, build, build_cpp_suite, run_suite


@pytest.mark.timeout(900)  # a first build takes 1 or 2 minutes
def test_cpp_suite() -> None:
    run_suite(build_cpp_suite())


@pytest.mark.full_only
@pytest.mark.timeout(3600)  # torch's headers are parsed once for each source
def test_each_source_compiles_alone() -> None:
    """A source includes what it uses, also what its neighbours in a unit include."""
    build(ROOT, "alone", "_C", f"Python_EXECUTABLE={sys.executable}", "DDPX_UNITY=OFF")
