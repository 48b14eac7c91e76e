"""An extension that has libstdc++ in itself exports none of it, and takes none of torch's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: object, **variables: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_static_libstdcxx_stays_private(tmp_path: Path) -> None:
    """Two copies that replace each other's functions crash, or fail to read numbers."""
    if not (ROOT / "build" / "objects").exists():
        pytest.skip("the extension was not built in this checkout; make build")
    if shutil.which("objdump") is None:
        pytest.skip("objdump was not found; apt install binutils")
    archive = Path(_run("g++", "-print-file-name=libstdc++.a").strip())
    if not archive.is_absolute():
        pytest.skip("this compiler has no static libstdc++")
    (tmp_path / "libstdc++.a").symlink_to(archive)  # the linker finds it before the shared one
    command = (sys.executable, "setup.py", "build_ext", "--build-temp", "build/objects")
    _run(*command, "--build-lib", tmp_path, LDFLAGS=f"-L{tmp_path}")
    (extension,) = tmp_path.glob("ddpx/_C*.so")
    assert "libstdc++.so" not in _run("objdump", "-p", extension)  # it was linked statically
    symbols = _run("objdump", "-T", extension)
    assert "ddpx" in symbols  # the table was read
    classic_locale, filesystem = "_ZNSt6locale7classicEv", "_ZNSt10filesystem"
    assert not re.findall(rf"\b{classic_locale}$", symbols, re.MULTILINE)
    assert not re.findall(rf"\*UND\*.*\b{filesystem}\w*$", symbols, re.MULTILINE)
