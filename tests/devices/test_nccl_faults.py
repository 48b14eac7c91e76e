"""Ranks end in all ways where hosts do not wait: the others name them, and end as they want to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fault_cases import Case, Report, train
from fault_ranks import run_ranks
from free_port import free_port
from mistakes import Outcome
from nccl_mistakes import MISTAKES, make_mistake

from ddpx.cli.guard import NCCL_SURVIVAL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.timeout(180),
]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "faults" / "fault_script.py"
SIZE = 3
DEADLINE_S = 5.0
END_S = 20.0  # of a process, after its error
PHASES = ("forward", "gradient hook", "bucket in flight", "communication hook", "between steps")
EXIT_CODES = {"kill": -9, "exception": 1, "exit 0": 0, "leave": 0}
NO_END = ("leave", "communication hook")  # torch makes a RuntimeError of an exit in a hook
CASES = [
    *((fault, phase) for fault in EXIT_CODES for phase in PHASES if (fault, phase) != NO_END),
    ("exception", "before wrapping"),
    ("kill", "construction"),
    ("exception", "construction"),
]


def _id(*parts: str) -> str:
    return "-".join([*parts, f"cuda-nccl-{SIZE}"])


@pytest.mark.parametrize("fault, phase", CASES, ids=[_id(*case) for case in CASES])
def test_survivors_name_the_rank(fault: str, phase: str) -> None:
    case = Case(fault, phase, "nccl", SIZE)
    endings = run_ranks(SIZE, train, case, backend="nccl", timeout_s=40)
    victim = case.victim_rank
    assert endings[victim].exit_code == EXIT_CODES[fault], endings[victim]
    since = endings[victim].marks["fault"]
    for rank in range(victim):
        report = endings[rank].value
        assert isinstance(report, Report), (rank, endings[rank])
        assert report.kind == "RankFailure", (rank, report)
        assert victim in report.ranks, (rank, report)
        assert report.at_s - since < DEADLINE_S, (report.at_s - since, rank, report)
        assert endings[rank].exit_code == 0, (rank, endings[rank])


@pytest.mark.parametrize("mistake", MISTAKES, ids=[_id(name) for name in MISTAKES])
def test_ranks_name_calls_that_do_not_fit_together(mistake: str) -> None:
    endings = run_ranks(SIZE, make_mistake, mistake, backend="nccl", timeout_s=40)
    since = endings[0].marks["fault"]
    for rank, ending in enumerate(endings):
        outcome = ending.value
        assert isinstance(outcome, Outcome), (rank, endings)
        assert outcome.kind == "RankMismatch", (rank, outcome)
        assert f"rank {SIZE - 1} made " in outcome.text, (rank, outcome)
        assert outcome.at_s - since < DEADLINE_S, (outcome.at_s - since, rank, outcome)
        assert ending.exit_code == 0, (rank, ending)


def _run_script(fault: str, **environment: str) -> list[tuple[int | None, str, float]]:
    """Exit code, stderr and seconds to the end, by rank. The last rank has the fault."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), fault, str(SIZE - 1), "nccl"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "RANK": str(rank),
                "WORLD_SIZE": str(SIZE),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **environment,
            },
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(SIZE)
    ]
    ended_s: dict[int, float] = {}
    deadline = time.monotonic() + 120
    while len(ended_s) < SIZE and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ended_s and process.poll() is not None:
                ended_s[rank] = time.monotonic()
        time.sleep(0.05)
    results = []
    for rank, process in enumerate(processes):
        code = process.poll()
        process.kill()
        text = process.communicate()[1]
        results.append((code, text, ended_s.get(rank, time.monotonic())))
    return results


def _time_of(name: str, text: str) -> float:
    found = re.search(rf"^{name} ([0-9.]+)$", text, re.M)
    assert found, text
    return float(found[1])


# torch's watchdog of a group that met an error sleeps for a minute, which a call of
# destroy_process_group() waits for, and then ends the process. With these settings it does not.

SCRIPTS: dict[str, dict[str, str]] = {
    "kill": {},
    "exception": {},
    "exit 0": {},
    "leave": {},
    "leave early": {},
    "kill, destroy": NCCL_SURVIVAL,
    "exit 0, destroy": NCCL_SURVIVAL,
}


@pytest.mark.parametrize("fault, environment", SCRIPTS.items(), ids=[_id(name) for name in SCRIPTS])
def test_scripts_end_with_their_own_exit_code(fault: str, environment: dict[str, str]) -> None:
    results = _run_script(fault, **environment)
    for rank in range(SIZE - 1):
        code, text, ended_s = results[rank]
        assert "ddpx.RankFailure: [ddpx rank " in text, (rank, code, text[-3000:])
        assert f" rank {SIZE - 1} (host " in text, (rank, text[-3000:])
        end = _time_of(f"END {rank}", text)
        if fault != "leave early":
            since = _time_of("FAULT", results[SIZE - 1][1])
            assert end - since < DEADLINE_S or environment, (rank, text[-3000:])
        assert code == 1, (rank, code, text[-3000:])
        assert ended_s - end < END_S, (rank, ended_s - end, text[-3000:])
