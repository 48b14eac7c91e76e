"""Builds and runs the C++ tests, so that pytest alone runs every test of ddpx."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
from cmake_build import ROOT, build, run_suite

from ddpx import _C


def _objects() -> Path | None:
    """Where those of the extension lie, if it was built here since its sources changed."""
    folder = f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    objects = ROOT / "build" / folder / "csrc"
    extension = Path(str(_C.__file__))
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    newest = max(path.stat().st_mtime for path in sources)
    here = extension.is_relative_to(ROOT) and extension.stat().st_mtime > newest
    return objects if here and objects.is_dir() else None


@pytest.mark.timeout(900)  # a first build compiles for about 2 minutes
def test_cpp_suite() -> None:
    """Of the code that users run: the extension's own objects, where they are there."""
    definitions = (f"Python_EXECUTABLE={sys.executable}", f"DDPX_OBJECTS={_objects() or ''}")
    run_suite(build(ROOT, "cpp", "ddpx_tests", *definitions))
