"""The translation units: every source is in one, and only the AVX2 kernels need AVX2."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import units

from ddpx import _C

CSRC = Path(__file__).resolve().parents[2] / "csrc"

INCLUDE = re.compile(r'#include "(.*)"')


def _sources_of(unit: Path) -> list[Path]:
    if unit.parent != units.UNITS:
        return [unit]
    return [(unit.parent / name).resolve() for name in INCLUDE.findall(unit.read_text())]


def test_every_source_is_in_one_unit() -> None:
    found = [
        source
        for group in units.GROUPS
        for unit in units.write_units(group)
        for source in _sources_of(unit)
    ]
    assert sorted(found) == sorted(CSRC.rglob("*.cpp"))


def test_a_unit_has_sources_of_its_group_only() -> None:
    for group in units.ONE_FOLDER:
        for unit in units.write_units(group):
            folders = {source.relative_to(CSRC).parts[0] for source in _sources_of(unit)}
            assert folders == {group}


def test_kernels_stay_alone() -> None:
    alone = [path for path in units.write_units("shm") if path.parent != units.UNITS]
    assert [path.name for path in alone] == ["kernels_avx2.cpp", "kernels_baseline.cpp"]


def test_a_unit_is_written_once() -> None:
    """Otherwise each build would compile all units."""
    before = {unit: unit.stat().st_mtime_ns for unit in units.write_units("core")}
    assert len(before) > 1
    assert {unit: unit.stat().st_mtime_ns for unit in units.write_units("core")} == before


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ValueError, match="'gpu' is no group of sources"):
        units.sources("gpu")


def test_only_the_avx2_kernels_use_avx() -> None:
    """On a processor without AVX, an instruction of AVX elsewhere would end the process."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump was not found; apt install binutils")
    command = [objdump, "--disassemble", "--demangle", "--no-show-raw-insn", _C.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    function = ""
    with_avx = set()
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line.partition(" <")[2]
        elif "%ymm" in line or "%zmm" in line or re.search(r"\tv\w+ +.*%xmm", line):
            with_avx.add(function)
    if "elf64-x86-64" in listing:
        assert any("ddpx::shm::avx2" in name for name in with_avx)
    assert [name for name in with_avx if "ddpx::shm::avx2" not in name] == []
