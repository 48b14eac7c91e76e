"""Suites of other projects, which `make foreign-test` runs with torch's DDP and with ReducerDDP.

| module | content |
| --- | --- |
| `suite` | what a suite is: its packages, and how its tests run |
| `suites/` | one file for each suite |
| `environments` | virtual environments with the packages of a suite |
| `inside/` | modules that run within these environments |
| `pytest_runs`, `script_runs` | run test files, and scripts of several ranks |
| `reasons` | the reasons of intended differences |
| `page` | the tables of docs/compatibility.md |

Outcomes and verdicts are those of `make peer-test`, in tests/peer.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "foreign"
INSIDE = Path(__file__).with_name("inside")
SCRIPTS = ROOT / "tests" / "foreign" / "scripts"

sys.path.append(str(ROOT / "tests" / "peer"))
