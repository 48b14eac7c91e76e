"""Scripts under several launchers: their stderr after the death of a rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_scripts import ForkServer, Job
from free_port import free_port

SCRIPT = Path(__file__).parent / "fault_script.py"
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 5.0
_LIMIT_S = 120.0  # a busy machine takes seconds to import torch
WORLD_SIZE = 3
pytestmark = pytest.mark.timeout(240)

Launch = Callable[..., Job]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(_environment(0, 1, 0)) as server:
        yield server


@pytest.fixture
def launch(server: ForkServer, tmp_path: Path) -> Launch:
    """``launch(fault, victim, transport)`` starts the script on all ranks."""

    def start(fault: str, victim: int, transport: str, world_size: int = WORLD_SIZE) -> Job:
        port = free_port()
        return server.start(
            tmp_path,
            [str(SCRIPT), fault, str(victim), transport],
            [_environment(rank, world_size, port) for rank in range(world_size)],
        )

    return start


def _stderrs(job: Job) -> list[str]:
    """Waits for the end of all ranks."""
    job.wait(limit_s=_LIMIT_S)
    return [job.stderr(rank) for rank in job.ranks]


def _time_of(name: str, text: str) -> float:
    found = re.search(rf"^{name} ([0-9.]+)$", text, re.M)
    assert found, text
    return float(found[1])


def _check_survivors(errors: list[str], fault: str, victim: int, what: str) -> None:
    since = _time_of("FAULT", errors[victim])
    for rank, text in enumerate(errors):
        if rank != victim:
            assert f"ddpx.RankFailure: [ddpx rank {rank}, step 2, " in text, text
            assert f"rank {victim} (host " in text, text
            assert any(part in text for part in what.split(" | ")), text
            assert fault != "kill behind a call" or ", in all_reduce\n" in text, text
            assert _time_of(f"END {rank}", text) - since < DEADLINE_S


@pytest.mark.parametrize(
    "fault, victim, transport, exit_code, what",
    [
        # The kernel may no longer know how a process ended. The report then says only "died".
        pytest.param(
            *("kill", 0, "gloo", -9, "; it was last seen in step 2, phase between"),
            marks=pytest.mark.full_only,
        ),
        ("kill", 2, "shm", -9, "was killed by SIGKILL"),
        pytest.param(
            *("exception", 1, "gloo", 1, "ended its script (ValueError: no such sample)"),
            marks=pytest.mark.full_only,
        ),
        ("exception", 0, "shm", 1, "ended its script (ValueError: no such sample)"),
        ("own hook", 1, "gloo", 1, "ended its script (ValueError: no such sample)"),
        ("interrupt", 2, "gloo", 1, "ended its script (KeyboardInterrupt)"),
        # Until the interpreter has ended, the report can only say that the rank left.
        ("system exit", 1, "shm", 5, "ended with exit code 5 | its script ended"),
        # Survivors wait in a collective call of the script itself.
        ("kill behind a call", 1, "gloo", -9, "; it was last seen in step 2, phase between"),
        ("kill behind a call", 0, "shm", -9, "; it was last seen in step 2, phase between"),
        ("kill behind Join", 1, "gloo", -9, "; it was last seen in step 2, phase between"),
        ("leave early", 2, "gloo", 0, "has left"),
        # The logger of the failure detector is a thread.
        ("kill, slow threads", 1, "gloo", -9, "was killed by SIGKILL | died"),
    ],
)
def test_survivors_of_plain_processes(
    launch: Launch, fault: str, victim: int, transport: str, exit_code: int, what: str
) -> None:
    job = launch(fault, victim, transport)
    errors = _stderrs(job)
    assert job.exit_code(victim) == exit_code, errors[victim]
    if fault == "leave early":
        return _check_left(errors, victim)
    _check_survivors(errors, fault, victim, what)
    for rank, code in enumerate(job.exit_codes()):
        if rank != victim:
            assert code == 1, (code, errors[rank])


def _check_left(errors: list[str], victim: int) -> None:
    for rank, text in enumerate(errors):
        if rank != victim:
            assert f"rank {victim} (host " in text and "has left" in text, text
            assert "model.join() for uneven inputs" in text, text


@pytest.mark.parametrize(
    "fault, victim, transport, cause",
    [
        ("early exception", 2, "gloo", "(ValueError: no such sample)"),
        ("early exception", 0, "shm", "(ValueError: no such sample)"),
    ],
)
def test_survivors_hear_why_a_rank_has_wrapped_no_model(
    launch: Launch, fault: str, victim: int, transport: str, cause: str
) -> None:
    job = launch(fault, victim, transport)
    errors = _stderrs(job)
    since = _time_of("FAULT", errors[victim])
    for rank, text in enumerate(errors):
        exit_code = job.exit_code(rank)
        assert exit_code == 1, (exit_code, text)
        if rank != victim:
            assert (
                f"ddpx.RankFailure: [ddpx rank {rank}, phase construction] rank {victim} (host "
                in text
            )
            assert "host unknown" not in text and cause in text, text
            assert _time_of(f"END {rank}", text) - since < DEADLINE_S


@pytest.mark.parametrize(("victim", "transport"), [(1, "gloo"), (0, "shm")])
def test_all_ranks_raise_the_error_of_a_bad_option(
    launch: Launch, victim: int, transport: str
) -> None:
    job = launch("bad option", victim, transport)
    errors = _stderrs(job)
    since = _time_of("FAULT", errors[victim])
    for rank, text in enumerate(errors):
        assert job.exit_code(rank) == 1, text
        assert f"rank {victim}: ValueError: bucket_cap_mb=nan is not a bucket size" in text, text
        assert rank == victim or _time_of(f"END {rank}", text) - since < DEADLINE_S


@pytest.mark.parametrize("world_size", [2, 3])
def test_survivors_that_wrap_later_hear_it_too(launch: Launch, world_size: int) -> None:
    """Ranks that wrap later read the report from the store of rank 0."""
    victim = world_size - 1
    errors = _stderrs(launch("late peers", victim, "gloo", world_size))
    for rank in range(victim):
        assert f"ddpx.RankFailure: [ddpx rank {rank}, " in errors[rank], errors[rank]
        assert "(ValueError: no such sample)" in errors[rank], errors[rank]


def test_an_exception_of_no_rank_is_printed_as_ever() -> None:
    code = "import ddpx, torch.distributed; raise ValueError('no such sample')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=_environment(0, 1, 0),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("\nValueError: no such sample\n"), done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.parametrize("fault", ["thread", "thread, one hook", "child", "logged", "finalizer"])
def test_an_exception_that_is_only_printed_ends_nothing(launch: Launch, fault: str) -> None:
    job = launch(fault, 1, "gloo")
    errors = _stderrs(job)
    assert job.exit_codes() == [0] * WORLD_SIZE, errors
    assert not any("RankFailure" in text for text in errors), errors


@pytest.mark.parametrize(
    "victim, fault", [(1, "kill"), pytest.param(0, "exception", marks=pytest.mark.full_only)]
)
def test_torchrun_ends_survivors_at_once_and_they_still_report(victim: int, fault: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD_SIZE}"]
    command += [f"--master-port={free_port()}", str(SCRIPT), fault, str(victim), "gloo"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode != 0
    for rank in range(WORLD_SIZE):
        if rank != victim:
            # Once, though torchrun sends SIGTERM to a rank whose traceback has the report.
            assert done.stderr.count(f"ddpx.RankFailure: [ddpx rank {rank}, ") == 1, done.stderr
    assert done.stderr.count(f"rank {victim} (host ") == WORLD_SIZE - 1, done.stderr
    assert "ddpx.shrink" not in done.stderr, "torchrun ends survivors"
    ends = {
        # torchrun may reap the process first. Older kernels then do not tell other processes how it
        # ended.
        "kill": "(was killed by SIGKILL|died)",
        "exception": r"raised an exception that ended its script \(ValueError: no such sample\)",
    }
    assert re.search(rf"rank {victim} \(host [^)]+\) {ends[fault]}", done.stderr), done.stderr


def test_a_job_that_is_told_to_end_blames_nobody(launch: Launch) -> None:
    job = launch("none", 1, "gloo")
    job.wait_for("FAULT", rank=1, limit_s=_LIMIT_S)
    for rank in job.ranks:
        job.send_signal(rank, signal.SIGTERM)
        time.sleep(0.02)  # as with a launcher that has to inform many processes
    errors = _stderrs(job)
    assert not any("Rank" in text for text in errors), errors
    assert job.exit_codes() == [-signal.SIGTERM] * WORLD_SIZE


def test_a_survivor_that_gets_sigterm_reports_and_dies_of_it(launch: Launch) -> None:
    job = launch("kill", 1, "gloo")
    job.wait(1, limit_s=_LIMIT_S)
    for rank in (0, 2):
        job.send_signal(rank, signal.SIGTERM)
    errors = _stderrs(job)
    for rank in (0, 2):
        assert f"ddpx.RankFailure: [ddpx rank {rank}, " in errors[rank], errors[rank]
        assert "rank 1 (host " in errors[rank], errors[rank]
        assert job.exit_code(rank) in (-signal.SIGTERM, 1)
