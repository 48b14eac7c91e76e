"""An extension with a static libstdc++ exports none of it, and takes none of it from torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import units
from extension import EXTENSION

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_static_libstdcxx_stays_private(tmp_path: Path) -> None:
    """Two copies that replace each other's functions crash, or fail to read numbers."""
    for tool in ("g++", "objdump"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} was not found; apt install g++ binutils")
    archive = Path(_run("g++", "-print-file-name=libstdc++.a").strip())
    if not archive.is_absolute():
        pytest.skip("this compiler has no static libstdc++")
    paths = [path for group in units.GROUPS for path in units.write_units(group)]
    objects = [
        ROOT / "build" / "objects" / path.relative_to(ROOT).with_suffix(".o") for path in paths
    ]
    if not all(path.exists() for path in objects):
        pytest.skip("the extension was not built in this checkout; make build")
    (tmp_path / "libstdc++.a").symlink_to(archive)  # the linker finds it before the shared one
    library = tmp_path / "linked.so"
    folders = [f"-L{folder}" for folder in (tmp_path, *EXTENSION.library_dirs)]
    libraries = [f"-l{name}" for name in EXTENSION.libraries]
    _run(
        "g++", "-shared", *objects, *folders, *libraries, *EXTENSION.extra_link_args, "-o", library
    )

    assert "libstdc++.so" not in _run("objdump", "-p", library)  # it was linked statically
    symbols = _run("objdump", "-T", library)
    assert "PyInit__C" in symbols  # the table was read
    for of_archive in ("_ZNSt6locale7classicEv", "_ZNSi10_M_extractIdEERSiRT_"):
        assert not re.findall(rf"\b{of_archive}$", symbols, re.MULTILINE)
    assert not re.findall(r"\*UND\*.*\b_ZNK?St10filesystem\w*$", symbols, re.MULTILINE)
