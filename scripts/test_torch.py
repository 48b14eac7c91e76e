"""Tests ddpx with another version of torch, and writes the result into README.md.

    make test-torch VERSION=2.12.0

Builds an sdist, installs torch and the sdist into a fresh virtual environment outside the
checkout, and runs there: scripts/smoke.py; the tests of tests/unit and tests/behaviour; the parity
matrix at 2 ranks. On CPU, also with a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from packages import INSTALLED_ONLY, ROOT, build, installed, run
from tabulate import tabulate

BEGIN, END = "<!-- torch versions: begin -->", "<!-- torch versions: end -->"
HEADERS = ("torch", "Python", "tests/unit, tests/behaviour, parity at 2 ranks", "on")
TESTS = ("tests/unit", "tests/behaviour", "tests/parity")
REQUIRED = ("numpy", "pytest==9.0.3", "pytest-timeout==2.4.0", "tabulate", "click")


def test(version: str) -> Sequence[str]:
    """The table's row for this version of torch."""
    (package,) = build("sdist")
    with installed(package, version, *REQUIRED) as (python, elsewhere):
        run(python, INSTALLED_ONLY, ROOT / "scripts" / "smoke.py", cwd=elsewhere)
        query = "import platform, torch; print(torch.__version__, platform.python_version())"
        words = run(python, "-c", query, cwd=elsewhere).split()
        command = (python, INSTALLED_ONLY, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
        printed = run(*command, "-k", "not 3- and not 4-")
    print(printed)
    outcome = re.sub(r" in [\d.]+s.*", "", printed.strip().splitlines()[-1])
    return *words, re.sub(r", \d+ warnings?", "", outcome), time.strftime("%Y-%m-%d", time.gmtime())


def write(readme: Path, row: Sequence[str]) -> None:
    """Puts the row into the table of the README, in place of the same version's row."""
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    lines = table.strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    rows = sorted([list(row), *(other for other in rows if other[0] != row[0])], reverse=True)
    new = tabulate(rows, headers=HEADERS, tablefmt="github", disable_numparse=True)
    readme.write_text(f"{before}{BEGIN}\n{new}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("version", help="of torch, as 2.12.0")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    arguments = parser.parse_args()
    try:
        write(arguments.readme, test(arguments.version))
    except RuntimeError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
