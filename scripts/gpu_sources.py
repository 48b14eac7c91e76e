"""Digests of the sources that a result of ``make gpu`` depends on.

The sources of a test are ddpx, the test's file, and the files of the checkout that it imports. The
sources of a measured part are ddpx, its script, and what the script imports. Comments and blank
lines do not count, nor do the fixtures of conftest.py.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Parts of ddpx that no test on a GPU runs.
_NOT_REACHED = (
    *("csrc/shm", "csrc/shm_backend"),
    *("ddpx/cli", "ddpx/elastic", "ddpx/integrations", "ddpx/timeline"),
)
# Folders that a test runs, but does not import.
_READ_BY = {"tests/examples/test_examples.py": "examples"}
_IMPORTED_FROM = ("tests", "tests/devices", "tests/parity", "tests/robustness", "benchmarks")
_IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)


def _code(file: Path) -> bytes:
    """The lines that are not only a comment."""
    comment = "#" if file.suffix == ".py" else "//"
    lines = map(str.strip, file.read_text().splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(comment)).encode()


def _digest(files: Iterator[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + _code(file) + b"\0")
    return digest.hexdigest()


def _in_folder(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.suffix in (".cpp", ".h", ".py"))


@functools.cache
def _library(root: Path) -> str:
    left_out = {root / folder for folder in _NOT_REACHED}
    files = [*_in_folder(root / "csrc"), *_in_folder(root / "ddpx")]
    reached = (file for file in files if left_out.isdisjoint(file.parents))
    return _digest(iter([*reached, root / "setup.py"]), root)


def _with_imports(file: Path, root: Path) -> set[Path]:
    """The file, and all files of tests and benchmarks that it imports."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        file = waiting.pop()
        if file in found or not file.exists():
            continue
        found.add(file)
        names = _IMPORT.findall(file.read_text())
        folders = [file.parent, *(root / folder for folder in _IMPORTED_FROM)]
        waiting += [folder / f"{name}.py" for name in names for folder in folders]
    return found


@functools.cache
def sources_digest(file: str, root: Path = ROOT) -> str:
    """A digest of the sources of a result.

    Args:
        file: The test's file or the part's script, relative to the checkout.
        root: The checkout.
    """
    files = _with_imports(root / file, root)
    if file in _READ_BY:
        files |= set(_in_folder(root / _READ_BY[file]))
    own = _digest(iter(files), root)
    return hashlib.sha256((_library(root) + own).encode()).hexdigest()[:10]


def digest_of_test(test: str) -> str:
    """The digest of a test, by its id."""
    return sources_digest(test.partition("::")[0])
