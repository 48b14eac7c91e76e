"""Makes NCCL ranks fail under ddpx and torch's DDP, and writes what the other ranks see as JSON.

    python3 scripts/gpu_failures.py --json failures.json              # three ranks on one GPU
    python3 scripts/gpu_failures.py --device cpu --tiny --json f.json # a trial over gloo

`make gpu` runs this script. scripts/gpu_report.py writes the table into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "devices"), str(ROOT / "tests")]

from reliability import (  # noqa: E402  (adds the folder of the faults to the path)
    WORLD_SIZE,
    Case,
    DistributedDataParallel,
    Ending,
    ReducerDDP,
    case_of,
    run_ranks,
    see,
    shortened,
    train,
)

GROUP_TIMEOUT_S = 15.0
LIMIT_S = 28.0  # of a case; under DDP, ranks wait until then
_AT_ONCE = 4  # cases
WRAPPERS = {"ddpx": ReducerDDP, "DDP": DistributedDataParallel}

TROUBLE: dict[str, Case] = {
    "killed, in backward": case_of("kill", "gradient hook"),
    "killed, while others construct": case_of("kill", "construction"),
    "exception in forward": case_of("exception", "forward"),
    "`os._exit(0)` between steps": case_of("exit 0", "between steps"),
    "`sys.exit(0)` in a communication hook": case_of("leave", "communication hook"),
    "3 s late (`DDPX_STALL_WARN=0.5`)": case_of("stall", "forward"),
    "3 s late (`set_stall_timeout(error=1.5)`)": case_of("stall, raise", "gradient hook"),
    "stopped by SIGSTOP (`set_stall_timeout(error=1.5)`)": case_of("stop, raise", "forward"),
}
# One rank makes other collective calls than the others: tests/devices/nccl_mistakes.py.
MISTAKES = ("sums a tensor of another shape", "makes two calls in another order")
# DDP's ranks see nothing before the timeout, which takes long: one phase of each kind.
ALSO_DDP = (
    "killed, in backward",
    "`os._exit(0)` between steps",
    "stopped by SIGSTOP (`set_stall_timeout(error=1.5)`)",
    "sums a tensor of another shape",
)


def _row(name: str, wrapper: str, run: Callable[[], list[Ending]]) -> dict[str, Any]:
    endings = run()
    sight = see(endings, WORLD_SIZE - 1)
    return {
        "fault": name,
        "wrapper": wrapper,
        **asdict(replace(sight, text=shortened(sight.text))),
        "exit_codes": [ending.exit_code for ending in endings],
    }


def _cases(backend: str) -> list[Callable[[], dict[str, Any]]]:
    cases: list[Callable[[], dict[str, Any]]] = []

    def add(name: str, wrapper: str, run: Callable[[], list[Ending]]) -> None:
        if wrapper == "ddpx" or name in ALSO_DDP:
            cases.append(lambda: _row(name, wrapper, run))

    options: dict[str, Any] = {"backend": backend, "timeout_s": GROUP_TIMEOUT_S, "limit_s": LIMIT_S}
    for wrapper, wrap in WRAPPERS.items():
        for name, case in TROUBLE.items():
            case = replace(case, transport=backend)
            arguments = (train, case, wrap, True)
            environment = case.environment
            add(
                name,
                wrapper,
                lambda a=arguments, e=environment: run_ranks(  # type: ignore[misc]
                    WORLD_SIZE, *a, environment=e, **options
                ),
            )
        for name in MISTAKES if backend == "nccl" else ():
            from nccl_mistakes import make_mistake  # type: ignore[import-not-found]

            add(
                name,
                wrapper,
                lambda n=name, w=wrap: run_ranks(  # type: ignore[misc]
                    WORLD_SIZE, make_mistake, n, w, **options
                ),
            )
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two cases, for a trial")
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    cases = _cases("nccl" if arguments.device == "cuda" else "gloo")
    deadline = time.monotonic() + arguments.limit_s - LIMIT_S
    rows: list[dict[str, Any]] = []

    def run(case: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() < deadline:
            rows.append(case())
            arguments.json.write_text(json.dumps(record, indent=1))

    record = {
        "ranks": WORLD_SIZE,
        "timeout_s": GROUP_TIMEOUT_S,
        "num_cases": len(cases),
        "rows": rows,
    }
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(run, cases[:2] if arguments.tiny else cases))
    ours = [row for row in rows if row["wrapper"] == "ddpx"]
    silent = [row["fault"] for row in ours if not row["text"]]
    for fault in silent:
        print(f"under ddpx, no rank reported: {fault}")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
