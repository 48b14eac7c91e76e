"""`make docs` builds pages of all public names without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from public_api import ROOT, public_names

sphinx = pytest.importorskip("sphinx", reason="Sphinx is not installed; `make setup` installs it")


def _recipe() -> list[str]:
    """The words of the command that `make docs` runs."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    (start,) = (index for index, line in enumerate(lines) if line.startswith("docs:"))
    return lines[start + 1].split()


@pytest.mark.timeout(300)
def test_pages_have_each_public_name_and_sphinx_does_not_warn(tmp_path: Path):
    python, *words, folder = _recipe()
    assert (python, folder) == ("$(BIN)/python", "build/docs")
    assert "--fail-on-warning" in words
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = "\n".join(page.read_text() for page in tmp_path.glob("*.html"))
    missing = [name.name for name in public_names() if f'id="{name.name}"' not in pages]
    assert not missing, "names without an entry in docs/api: " + ", ".join(missing)
