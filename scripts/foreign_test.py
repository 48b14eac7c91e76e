"""Runs test suites of other projects, with torch's DDP and with ReducerDDP in its place.

    make foreign-test
    make foreign-test SUITE=torchft

Each suite has a virtual environment in build/foreign, with the torch of .venv, this checkout's
ddpx, and the packages of the suite. The command writes a table for each suite into
docs/compatibility.md.

The run fails in two cases. A test passes with torch's class but not with ReducerDDP, and
scripts/foreign/reasons.py has no reason. Or there is a reason for a test that passes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from importlib.metadata import version

from foreign import BUILD, ROOT
from foreign.environments import Environment, make
from foreign.page import differs, table
from foreign.suite import CLASSES, Outcomes, Suite, compare
from foreign.suites import SUITES
from marked_page import write_between_marks
from verdicts import BAD, Line, summary

PAGE = ROOT / "docs" / "compatibility.md"


def main() -> int:
    arguments = _parse()
    is_bad = False
    for name in arguments.suite or SUITES:
        start = time.monotonic()
        suite = SUITES[name]
        print(f"{name}:", flush=True)
        environment = make(name, suite.packages, arguments.fresh)
        lines = _run(suite, environment)
        if not arguments.no_page:
            write_between_marks(PAGE, f"foreign {name}", _section(suite, environment, lines))
        for line in filter(differs, lines):
            print(f"  {line.verdict} {line.name}: {line.ddpx and line.ddpx.reason}")
        print(f"  {summary(lines)}; {time.monotonic() - start:.0f} s", flush=True)
        is_bad |= any(line.verdict in BAD for line in lines)
    return int(is_bad)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", nargs="*", help=f"{', '.join(SUITES)}; default: all")
    parser.add_argument("--fresh", action="store_true", help="install the packages anew")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.suite if name not in SUITES]
    if unknown:
        parser.error(f"unknown suite: {', '.join(unknown)}. The suites are {', '.join(SUITES)}.")
    return arguments


def _run(suite: Suite, environment: Environment) -> list[Line]:
    outcomes: dict[str, Outcomes] = {}
    for contestant in CLASSES:
        start = time.monotonic()
        outcomes[contestant] = suite.run(environment, contestant)
        print(f"  {contestant}: {time.monotonic() - start:.0f} s", flush=True)
        file = BUILD / f"{suite.name}-{contestant}.json"
        found = {name: outcome.to_json() for name, outcome in outcomes[contestant].items()}
        file.write_text(json.dumps(found, indent=1))
    return compare(outcomes["torch"], outcomes["ddpx"], suite.reasons)


def _section(suite: Suite, environment: Environment, lines: list[Line]) -> str:
    """The versions, the packages that are missing, and the table."""
    versions = {**environment.versions, "torch": version("torch")}
    words = ", ".join(f"{name} {number}" for name, number in versions.items())
    date = datetime.date.today().isoformat()
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, CPU"
    parts = [f"{date}: {words}; {system}."]
    parts += [
        f"{name} cannot be installed: {reason}" for name, reason in environment.missing.items()
    ]
    return "\n\n".join([*parts, table(lines, suite.reasons)])


if __name__ == "__main__":
    sys.exit(main())
