"""The built extension needs no glibc that is newer than that of torch's wheels."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ddpx import _C

WHEELS = (2, 28)  # torch's wheels are for manylinux_2_28

# The build machine's headers use these functions in place of older ones. An older machine builds
# the same sources without them.
BY_HEADERS = {"__libc_single_threaded", "pthread_cond_clockwait", "fstat", "stat"}

Version = tuple[int, ...]
Symbols = set[tuple[str, Version]]


def _symbols(library: str) -> Symbols:
    """The dynamic symbols of a library that have a version of glibc."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump was not found; apt install binutils")
    table = subprocess.run([objdump, "-T", library], capture_output=True, text=True, check=True)
    rows = re.findall(r"\bGLIBC_([0-9.]+)\)? +(?:0x\w+ +)?(\w+)$", table.stdout, re.MULTILINE)
    return {(name, tuple(map(int, version.split(".")))) for version, name in rows}


def _too_new(needed: Symbols, provided: Symbols) -> list[str]:
    """The symbols that no glibc of torch's wheels has.

    A function that is as old as the wheels, but has moved to another library of glibc or has
    changed, has a new version beside the old one. The linker takes the new version.
    """
    old = {name for name, version in provided if version <= WHEELS} | BY_HEADERS
    return sorted(name for name, version in needed if version > WHEELS and name not in old)


def test_the_extension_needs_no_newer_glibc():
    maps = Path("/proc/self/maps").read_text()
    libc = re.search(r"\S+/libc\.so\.6$", maps, re.MULTILINE)
    assert libc is not None, "this Python does not use glibc"
    needed = _symbols(_C.__file__)
    assert ("memfd_create", (2, 27)) in needed  # the table was read
    too_new = _too_new(needed, _symbols(libc.group()))
    assert not too_new, (
        f"csrc uses {too_new}, which glibc {WHEELS[0]}.{WHEELS[1]} does not have. Use an older "
        "function, or add the name to BY_HEADERS if only the headers of this machine name it."
    )


def test_new_functions_are_found_and_new_versions_of_old_ones_are_not():
    needed = {("sigabbrev_np", (2, 32)), ("pthread_mutex_trylock", (2, 34)), ("fstat", (2, 33))}
    provided = needed | {("pthread_mutex_trylock", (2, 2, 5))}
    assert _too_new(needed, provided) == ["sigabbrev_np"]
