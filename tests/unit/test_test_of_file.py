"""docs/internals/test_of_file.md names an existing test of each file in ddpx/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "internals" / "test_of_file.md").read_text()
ROWS = [row.strip("|").split("|") for row in re.findall(r"^\| `.*$", PAGE, re.M)]


def _paths(cell: str) -> list[str]:
    return re.findall(r"`([\w/]+(?:\.py|/))`", cell)


def test_each_file_has_one_row() -> None:
    named = [path for files, _ in ROWS for path in _paths(files)]
    folders = tuple(path for path in named if path.endswith("/"))
    files = [str(file.relative_to(ROOT / "ddpx")) for file in (ROOT / "ddpx").rglob("*.py")]
    present = [
        path
        for path in files
        if not path.startswith(folders) and not path.endswith(("__init__.py", "__main__.py"))
    ]
    assert sorted(path for path in named if not path.endswith("/")) == sorted(present)
    assert all((ROOT / "ddpx" / folder).is_dir() for folder in folders)


def test_each_row_has_tests() -> None:
    for files, tests in ROWS:
        found = _paths(tests)
        assert found, files
        assert [path for path in found if not (ROOT / "tests" / path).is_file()] == [], files
