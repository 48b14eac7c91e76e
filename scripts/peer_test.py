"""Runs torch's own tests of DDP, both with ReducerDDP in DDP's place and with torch's class.

    make peer-test
    make peer-test VERSION=2.15.0

With a version, the tests of that torch run with that torch and this ddpx, in a new virtual
environment.

The run fails in two cases. A test passes with torch's class but not with ReducerDDP, and no table
of docs/divergences.md names it. Or a table names a test that passes. Outcomes with torch's class
are cached under build/, for each torch and this harness. --refresh ignores the cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Ranks share few cores. Must be set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).parent.parent
PEER = ROOT / "tests" / "peer"
DIVERGENCES = ROOT / "docs" / "divergences.md"
REQUIRED = ("expecttest", "numpy", "tabulate")  # of torch's module of tests, and of the harness


def main() -> int:
    arguments = _parse()
    if arguments.torch:
        return _run_with(arguments.torch, sys.argv[1:])
    sys.path.insert(0, str(PEER))
    import cuda_on_cpu
    import ranks
    import sync_batch_norm_kernels
    import torch_tests
    import verdicts
    from outcomes import Outcome

    start = time.monotonic()
    module = torch_tests.load()
    _import_what_ranks_need()
    cuda_on_cpu.install([module, sys.modules["torch.testing._internal.common_distributed"]])
    sync_batch_norm_kernels.install()
    names = [n for n in torch_tests.ddp_tests(module) if re.search(arguments.k, n)]

    which = ("torch", "ddpx") if arguments.contestant == "both" else (arguments.contestant,)
    outcomes: dict[tuple[str, str], Outcome] = {}
    cache = _cache_file()
    if cache.exists():
        for name, fields in json.loads(cache.read_text()).items():
            if not (arguments.refresh and name in names and "torch" in which):
                outcomes["torch", name] = Outcome(**fields)
    work = [
        (name, contestant, torch_tests.WORLD_SIZES.get(name, torch_tests.DEFAULT_WORLD_SIZE))
        for name in names
        for contestant in which
        if (contestant, name) not in outcomes
    ]

    def on_outcome(name: str, contestant: str, outcome: Outcome) -> None:
        outcomes[contestant, name] = outcome
        print(f"{contestant:5} {name}: {outcome.status} ({outcome.seconds} s)", flush=True)
        if arguments.verbose and outcome.details and contestant == which[-1]:
            print(outcome.details, flush=True)

    ranks.run_all(module, work, arguments.jobs, arguments.limit, on_outcome)
    _write_cache(cache, {n: o.to_json() for (who, n), o in outcomes.items() if who == "torch"})

    excused = verdicts.excused_tests(DIVERGENCES)
    lines = [
        verdicts.Line(
            name,
            outcomes.get(("torch", name)) if "torch" in which else None,
            outcomes.get(("ddpx", name)) if "ddpx" in which else None,
            name in excused,
        )
        for name in names
    ]
    if arguments.json:
        _write_json(arguments.json, lines)
    print(f"\n{verdicts.table(lines)}\n\n{verdicts.summary(lines)}")
    print(f"torch {_torch_version()}, gloo, {time.monotonic() - start:.0f} s")
    return 1 if any(line.verdict in verdicts.BAD for line in lines) else 0


def _run_with(torch: str, words: list[str]) -> int:
    """Runs this script with another torch."""
    from packages import INSTALLED_ONLY, build, installed

    (package,) = build("sdist")
    os.environ.pop("PYTHONPATH", None)  # ddpx is the installed one
    with installed(package, torch, *REQUIRED) as (python, _):
        command = [str(python), INSTALLED_ONLY, __file__, *words, "--torch", ""]
        return subprocess.run(command, check=False).returncode


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", metavar="PATTERN", default="", help="only tests with matching names")
    parser.add_argument("--class", dest="contestant", choices=["torch", "ddpx", "both"])
    parser.add_argument("--jobs", type=int, default=2, help="number of tests at a time")
    parser.add_argument("--limit", type=float, default=120, help="time limit of a test in s")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks of failed tests")
    parser.add_argument("--torch", metavar="VERSION", help="use this torch in a new environment")
    parser.add_argument("--refresh", action="store_true", help="run torch's class again, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes there")
    parser.set_defaults(contestant="both")
    return parser.parse_args()


def _import_what_ranks_need() -> None:
    """Runs once, before the first fork, and while DDP's name still means torch's class."""
    import torch._dynamo.convert_frame
    import torch.distributed.device_mesh  # noqa: F401

    import ddpx  # noqa: F401


def _torch_version() -> str:
    import torch

    return torch.__version__


def _cache_file() -> Path:
    """The cache file for this torch and this harness."""
    digest = hashlib.sha256()
    for source in (Path(__file__), *sorted(PEER.glob("*.py"))):
        digest.update(source.read_bytes())
    return ROOT / "build" / "peer" / f"torch-{_torch_version()}-{digest.hexdigest()[:16]}.json"


def _write_cache(cache: Path, outcomes: dict[str, Any]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    for old in cache.parent.glob(f"torch-{_torch_version()}-*.json"):
        old.unlink()
    cache.write_text(json.dumps(outcomes, indent=1))


def _write_json(file: Path, lines: list[Any]) -> None:
    file.write_text(
        json.dumps(
            [
                {
                    "test": line.name,
                    "verdict": line.verdict,
                    "torch": line.torch and line.torch.to_json(),
                    "ddpx": line.ddpx and line.ddpx.to_json(),
                }
                for line in lines
            ],
            indent=1,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
