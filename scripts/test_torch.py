"""Tests ddpx with another version of torch, and writes the result into README.md.

    make test-torch VERSION=2.12.0

Builds an sdist, and installs torch and the sdist into a new virtual environment outside the
checkout. There it runs scripts/smoke.py, tests/unit, tests/behaviour, and the parity matrix at 2
ranks. Everything runs on CPU, even with a CUDA build of torch.

    make test-torch VERSION=2.12.0 QUICK=1

The short run of CI: only scripts/smoke.py and the parity matrix at 2 ranks, without a change of
README.md. If torch cannot be installed within 5 minutes, the command says so and succeeds.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from packages import INSTALLED_ONLY, ROOT, build, installed, run
from tabulate import tabulate

BEGIN, END = "<!-- torch versions: begin -->", "<!-- torch versions: end -->"
HEADERS = ("torch", "Python", "tests/unit, tests/behaviour, parity at 2 ranks", "on")
TESTS = ("tests/unit", "tests/behaviour", "tests/parity")
QUICK_TESTS = ("tests/parity",)
QUICK_INSTALL_S = 300.0
REQUIRED = ("numpy", "pytest==9.0.3", "pytest-timeout==2.4.0", "tabulate", "click")


def test(version: str, quick: bool) -> Sequence[str]:
    """Returns the table's row for this version of torch.

    Raises:
        RuntimeError: A part failed. subprocess.TimeoutExpired: ``quick``, and torch could not be
            installed in time.
    """
    (package,) = build("sdist")
    limit_s = QUICK_INSTALL_S if quick else None
    with installed(package, version, *REQUIRED, torch_limit_s=limit_s) as (python, elsewhere):
        run(python, INSTALLED_ONLY, ROOT / "scripts" / "smoke.py", cwd=elsewhere)
        query = "import platform, torch; print(torch.__version__, platform.python_version())"
        words = run(python, "-c", query, cwd=elsewhere).split()
        command = (python, INSTALLED_ONLY, "-m", "pytest", "-q", "-p", "no:cacheprovider")
        tests = QUICK_TESTS if quick else TESTS
        printed = run(*command, *tests, "-k", "not 3- and not 4-")
    print(printed)
    outcome = re.sub(r" in [\d.]+s.*", "", printed.strip().splitlines()[-1])
    return *words, re.sub(r", \d+ warnings?", "", outcome), time.strftime("%Y-%m-%d", time.gmtime())


def write(readme: Path, row: Sequence[str]) -> None:
    """Writes the row into the table of the README. Replaces a row of the same version."""
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
    parser.add_argument("version", help="version of torch, such as 2.12.0")
    parser.add_argument("--quick", action="store_true", help="only smoke tests and parity")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    arguments = parser.parse_args()
    try:
        row = test(arguments.version, arguments.quick)
        if not arguments.quick:
            write(arguments.readme, row)
    except subprocess.TimeoutExpired:
        print(f"torch {arguments.version} was not tested: its installation took over 5 minutes")
    except RuntimeError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
