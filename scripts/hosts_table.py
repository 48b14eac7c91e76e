"""Makes emulated hosts fail. Writes ranks' reports into docs/reliability.md. Needs root (10 min).

    python scripts/hosts_table.py [--only 'killed-*'] [--default]

Exits with 1 unless each case ends as wanted.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from marked_page import write_between_marks
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "hosts")]

from emulated_hosts import CannotEmulate  # type: ignore[import-not-found]  # noqa: E402
from host_cases import all_cases  # type: ignore[import-not-found]  # noqa: E402
from host_checks import check  # type: ignore[import-not-found]  # noqa: E402
from host_runs import AT_ONCE, Outcome, Runs  # type: ignore[import-not-found]  # noqa: E402

_KIND = "emulated"
_HEADERS = [
    "hosts x ranks",
    "kind of host",
    "transport",
    "trouble",
    "victim",
    "result",
    "seconds to the last survivor's report",
    "reports of ranks",
]


def _result(outcome: Outcome) -> str:
    try:
        check(outcome)
    except AssertionError as error:
        return str(error).splitlines()[0].replace("|", "\\|")
    return "as wanted"


def _row(outcome: Outcome) -> list[str]:
    case = outcome.case
    times = {rank: outcome.report_s(rank) for rank in range(len(outcome.events))}
    reported = {rank: seconds for rank, seconds in times.items() if seconds is not None}
    reports = []
    for rank, seconds in reported.items():
        error = outcome.first(rank, "error")
        assert error is not None
        names = ", ".join(map(str, error["lost"])) or "none"
        reports.append(f"{rank}: {error['kind']} of {names} after {seconds:.1f} s")
    of_survivors = [reported[rank] for rank in outcome.reporters if rank in reported]
    last = f"{max(of_survivors):.1f}" if of_survivors else "-"
    victim = f"{'host of ' * case.trouble.whole_host}rank {case.victim_rank}"
    hosts = case.topology.replace("x", " x ")
    place = [hosts, _KIND, case.transport, case.trouble.what, victim]
    return [*place, _result(outcome), last, "; ".join(reports) or "-"]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="*", help="a pattern for names; writes no file")
    parser.add_argument("--default", action="store_true", help="only the cases of `make test`")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="cases at the same time")
    arguments = parser.parse_args()
    cases = [
        case
        for case in all_cases()
        if fnmatchcase(str(case), arguments.only) and (case.in_default_run or not arguments.default)
    ]
    rows = []
    with Runs(cases, arguments.at_once) as runs:
        for case in cases:
            try:
                rows.append(_row(runs.outcome(case)))
            except CannotEmulate as reason:
                print(f"The table of hosts stays as it is: {reason}")
                return 0
            print(f"{case}: {'; '.join(rows[-1][5:])}", flush=True)
    if arguments.only == "*":
        table = tabulate(rows, _HEADERS, tablefmt="github", disable_numparse=True)
        write_between_marks(ROOT / "docs" / "reliability.md", "hosts", table)
    return int(any("as wanted" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
