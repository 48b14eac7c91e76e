"""Tests ddpx with other versions of torch, on CPU.

    make test-torch VERSION="2.11.0 2.12.0"

Builds an sdist. For each version, two at a time: installs torch and the sdist into a new virtual
environment outside the checkout. There it runs scripts/smoke.py and the parity matrix at 2 ranks.
CI runs this command. If torch cannot be installed within 5 minutes, the command says so, and tests
the other versions.

    make test-torch VERSION=2.12.0 ALL=1

Runs tests/unit and tests/behaviour, too, without that limit (25 min).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packages import INSTALLED_ONLY, ROOT, NoTorch, build, installed, run

TESTS = ("tests/parity",)
ALL_TESTS = ("tests/unit", "tests/behaviour", "tests/parity")
INSTALL_LIMIT_S = 300.0
NUM_AT_A_TIME = 2
REQUIRED = ("numpy", "pytest==9.0.3", "pytest-timeout==2.4.0", "tabulate", "click")


def test(package: Path, version: str, all_tests: bool) -> str:
    """Returns pytest's last line for a package with this version of torch.

    Raises:
        NoTorch: Torch could not be installed in time.
        RuntimeError: A part failed.
    """
    limit_s = None if all_tests else INSTALL_LIMIT_S
    with installed(package, version, *REQUIRED, torch_limit_s=limit_s) as (python, elsewhere):
        run(python, INSTALLED_ONLY, ROOT / "scripts" / "smoke.py", cwd=elsewhere)
        command = (python, INSTALLED_ONLY, "-m", "pytest", "-q", "-p", "no:cacheprovider")
        tests = ALL_TESTS if all_tests else TESTS
        printed = run(*command, *tests, "-k", "not 3- and not 4-")
    return re.sub(r" in [\d.]+s.*", "", printed.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("version", nargs="+", help="version of torch, such as 2.12.0")
    parser.add_argument("--all", action="store_true", help="also tests/unit and tests/behaviour")
    arguments = parser.parse_args()
    (package,) = build("sdist")

    def passes(version: str) -> bool:
        start = time.monotonic()
        passed = True
        try:
            outcome = test(package, version, arguments.all)
        except NoTorch as error:
            outcome = f"NOT TESTED: {error}"
        except RuntimeError as error:
            outcome, passed = f"failed\n{error}", False
        print(f"torch {version}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
        return passed

    with ThreadPoolExecutor(NUM_AT_A_TIME) as threads:
        return int(not all(list(threads.map(passes, arguments.version))))


if __name__ == "__main__":
    sys.exit(main())
