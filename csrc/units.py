"""Groups the sources of ``csrc/`` into translation units. setup.py and CMake use this one rule.

    python csrc/units.py core    writes the units of a group, and prints their paths

A compiler parses torch's large headers once for each unit, which takes longer than our own code.
A unit is a generated file that includes several sources.

- A group is a folder of ``ONE_FOLDER``. All other sources are the group "core".
- A group has as few units as its lines per unit allow, of about the same size.
- A source with a pragma for the optimizer or the processor stays alone. The pragma would also apply
  to the sources after it.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).resolve().parent
UNITS = CSRC.parent / "build" / "units"

ONE_FOLDER = ("os", "shm", "health", "bindings")
GROUPS = (*ONE_FOLDER, "core")
# Limits the time to build after a change of one source. pybind11 makes much code of a line.
LINES_PER_UNIT = {"bindings": 500}
DEFAULT_LINES_PER_UNIT = 3500

_PRAGMA = re.compile(r"^#pragma (GCC|clang) (target|optimize|attribute)\b", re.MULTILINE)


def sources(group: str) -> list[Path]:
    """Return the sources of a group, in the order of their paths."""
    if group not in GROUPS:
        raise ValueError(f"{group!r} is no group of sources. The groups are {', '.join(GROUPS)}.")
    if group in ONE_FOLDER:
        return sorted(CSRC.glob(f"{group}/**/*.cpp"))
    return sorted(
        path for path in CSRC.rglob("*.cpp") if path.relative_to(CSRC).parts[0] not in ONE_FOLDER
    )


def write_units(group: str) -> list[Path]:
    """Write the units of a group into ``build/units``. Return the paths of all its units.

    A unit whose sources have not changed keeps its file, so that it is not compiled again.
    """
    alone: list[Path] = []
    together: list[tuple[Path, int]] = []
    for path in sources(group):
        text = path.read_text()
        if _PRAGMA.search(text):
            alone.append(path)
        else:
            together.append((path, text.count("\n")))
    UNITS.mkdir(parents=True, exist_ok=True)
    units = []
    lines_per_unit = LINES_PER_UNIT.get(group, DEFAULT_LINES_PER_UNIT)
    for index, part in enumerate(_divide(together, lines_per_unit)):
        unit = UNITS / f"{group}_{index}.cpp"
        names = (os.path.relpath(path, UNITS) for path in part)
        _write_if_changed(unit, "".join(f'#include "{name}"\n' for name in names))
        units.append(unit)
    return units + alone


def _divide(files: Sequence[tuple[Path, int]], lines_per_unit: int) -> list[list[Path]]:
    """Divide files and their numbers of lines into parts of about the same size, in order."""
    total = sum(lines for _, lines in files)
    parts: list[list[Path]] = [[] for _ in range(math.ceil(total / lines_per_unit))]
    before = 0
    for path, lines in files:
        middle = before + lines / 2
        parts[int(middle * len(parts) / total)].append(path)
        before += lines
    return [part for part in parts if part]


def _write_if_changed(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    # Another build of this checkout may read the file.
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(text)
    written.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--alone", action="store_true", help="each source is a unit of its own")
    arguments = parser.parse_args()
    units = sources(arguments.group) if arguments.alone else write_units(arguments.group)
    print("\n".join(str(path) for path in units))


if __name__ == "__main__":
    main()
