"""Tests ddpx with other versions of torch and of Python, on CPU.

    make test-torch VERSION="2.11.0 2.14.1"

Builds an sdist. For each version, installs torch and the sdist into a new virtual environment
outside the checkout. There it runs scripts/smoke.py, and tests/behaviour and tests/parity at up to
2 ranks: of large matrices, a part that has each value. A version that cannot be installed is a
failure.

    make test-torch VERSION=2.14.1 ALL=1

Runs tests/unit, too, and tests with any number of ranks: the same part as `make test`.

    make test-torch VERSION=2.13.0 WITH=python3.12

Uses this Python, by name or path. With Python 3.10, only scripts/smoke.py runs: a process of a test
would import the checkout's folder ddpx instead of the installed package.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

from packages import INSTALLED_ONLY, ROOT, build, installed, run

TESTS = ("tests/behaviour", "tests/parity")
PYTEST = ("pytest==9.0.3", "pytest-timeout==2.4.0", "pytest-xdist==3.8.0")
REQUIRED = (*PYTEST, "click", "numpy", "tabulate")
NUM_WORKERS = 4  # ranks often wait, so four workers suit two cores


def test(package: Path, version: str, all_tests: bool, interpreter: str) -> str:
    """Returns pytest's last line for a package with this version of torch.

    Raises:
        RuntimeError: Something could not be installed, or a test failed.
    """
    with installed(package, version, *REQUIRED, interpreter=interpreter) as (python, elsewhere):
        run(python, INSTALLED_ONLY, ROOT / "scripts" / "smoke.py", cwd=elsewhere)
        if run(python, "-c", "import sys; print(sys.version_info < (3, 11))").strip() == "True":
            return "passes scripts/smoke.py; no test runs with Python 3.10"
        command = [python, INSTALLED_ONLY, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--numprocesses", NUM_WORKERS, "--dist", "loadfile", "--no-loadscope-reorder"]
        tests = ("tests/unit", *TESTS) if all_tests else TESTS
        # Named on the command line, the folders would run with whole matrices.
        command += ["--override-ini", f"testpaths={' '.join(tests)}"]
        printed = run(*command, *(() if all_tests else ("--most-ranks", 2, "--strength", 1)))
    return re.sub(r" in [\d.]+s.*", "", printed.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("version", nargs="+", help="version of torch, such as 2.14.1")
    parser.add_argument("--all", action="store_true", help="also tests/unit, and any ranks")
    parser.add_argument("--python", default=sys.executable, help="of the environments")
    arguments = parser.parse_args()
    # As INSTALLED_ONLY, for processes that tests start.
    os.environ["PYTHONSAFEPATH"] = "1"
    # A developer's checkout on the path would take the place of the installed package.
    os.environ.pop("PYTHONPATH", None)
    (package,) = build("sdist")
    failed = False
    for version in arguments.version:
        start = time.monotonic()
        try:
            outcome = test(package, version, arguments.all, arguments.python)
        except RuntimeError as error:
            outcome, failed = f"FAILED\n{error}", True
        print(f"torch {version}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
