"""``ddpx run --keep-survivors``: ranks continue after the end of another rank, and none remains."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from cli_process import SCRIPTS, assert_code, run, start

from ddpx.cli import guard, torchrun
from ddpx.cli.group import run_command_line


def test_survivors_come_to_a_good_end():
    done = run("run", "--nproc-per-node", "3", "--keep-survivors", "ends.py", "killed", "0", "0")
    assert_code(done, 0)
    assert "ddpx: rank 0 was killed by SIGKILL; the other ranks continue" in done.stderr
    assert sorted(re.findall(r"rank \d ends well", done.stdout)) == [
        "rank 1 ends well",
        "rank 2 ends well",
    ]


def test_the_environment_precedes_settings_of_nccl(monkeypatch):
    given: dict[str, str] = {}
    monkeypatch.setattr(torchrun.torchrun, "run", lambda _: given.update(os.environ))
    asynchronous, dump = guard.NCCL_SURVIVAL
    monkeypatch.setenv(asynchronous, "3")
    monkeypatch.delenv(dump, raising=False)
    assert run_command_line(["run", "--keep-survivors", str(SCRIPTS / "ends.py")]) == 0
    assert (given[asynchronous], given[dump]) == ("3", guard.NCCL_SURVIVAL[dump])
    assert dump not in os.environ


@pytest.mark.full_only
def test_no_rank_comes_to_a_good_end():
    """Runs a module, also after a restart. A restart counts by itself."""
    done = run("run", "--keep-survivors", "--max-restarts=1", "-m", "ends", "3", "killed")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("ddpx: rank 0 ended with exit code 3") == 2
    assert done.stderr.count("ddpx: rank 1 was killed by SIGKILL") == 2


def test_ranks_that_failed_before_a_restart_do_not_count_behind_it():
    done = run("run", "--keep-survivors", "--max-restarts=1", "ends.py", "3,0", "killed,0")
    assert_code(done, 0)
    assert done.stdout.count("ends well") == 2


@pytest.mark.parametrize(
    "how",
    [
        *(
            pytest.param(how, marks=pytest.mark.full_only)
            for how in (signal.SIGINT, signal.SIGTERM)
        ),
        signal.SIGKILL,
    ],
)
def test_nothing_is_left_behind(how):
    command = start("run", "--keep-survivors", "waits.py")
    try:
        assert command.stdout is not None
        ranks = []
        while len(ranks) < 2:
            line = command.stdout.readline()
            assert line, command.stderr and command.stderr.read()
            ranks += [int(pid) for pid in re.findall(r"waiting in (\d+)", line)]
        guards = [_parent(pid) for pid in ranks]
        command.send_signal(how)
        command.communicate(timeout=60)
        deadline = time.monotonic() + 20
        while (left := [pid for pid in ranks + guards if _lives(pid)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert not left
        assert command.returncode == (-how if how == signal.SIGKILL else 128 + how)
    finally:
        command.kill()


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _lives(pid: int) -> bool:
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False
