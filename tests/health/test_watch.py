"""What the failure detector says of ranks that live: warnings, stacks, and when it says nothing."""

from __future__ import annotations

import copy
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx import ReducerDDP

_WARN_S = 0.3


def _be_patient() -> None:
    ddpx.set_stall_timeout(warn=10, error=math.inf, stacks=False)


@contextmanager
def _logged() -> Iterator[list[logging.LogRecord]]:
    """What this rank logs; it warns soon."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("ddpx.health")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
        _be_patient()


def _events(records: list[logging.LogRecord]) -> list[str]:
    return [record.event for record in records]  # type: ignore[attr-defined]


def _await(condition: Callable[[], bool]) -> None:
    """Not for ever: what comes after it tells what is missing."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _sleep_in_the_loader(end: Path) -> None:
    _await(end.exists)


def _wait_in_the_loader() -> None:
    dist.barrier()  # here it is
    dist.barrier()  # until it was asked


def _ask_for_a_stack() -> str | None:
    model = ReducerDDP(nn.Linear(2, 2))
    if dist.get_rank() == 1:
        _wait_in_the_loader()
        return None
    dist.barrier()
    stack = ddpx.peer_stack(model, 1, timeout=math.inf)
    dist.barrier()
    with pytest.raises(ValueError, match="rank 0 is not another rank of the process group"):
        ddpx.peer_stack(model, 0)
    return stack


def test_stack_of_a_rank(ranks):
    stack = ranks(2).run(_ask_for_a_stack)[0]
    first_thread = stack.split("\nthread ")[0]
    assert first_thread.startswith("thread MainThread:") and "_wait_in_the_loader" in first_thread
    assert "thread ddpx-health-log" not in stack


def _has_warned(records: list[logging.LogRecord]) -> bool:
    """Three times, and has shown where the other one sleeps."""
    texts = [record.getMessage() for record in records]
    return _events(records).count("stalled") >= 3 and "_sleep_in_the_loader" in "".join(texts)


def _end_when_warned(records: list[logging.LogRecord], end: Path) -> None:
    _await(lambda: _has_warned(records))
    end.touch()


def _stall(end: Path) -> list[tuple[str, str]]:
    with _logged() as records:
        model = ReducerDDP(nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        dist.barrier()
        ddpx.set_stall_timeout(warn=_WARN_S, stacks=True)
        if dist.get_rank() == 1:
            _sleep_in_the_loader(end)
        else:
            threading.Thread(target=_end_when_warned, args=(records, end)).start()
        loss.backward()
        if dist.get_rank() == 0:
            _await(lambda: "stall_over" in _events(records))
    for r in records:
        assert r.rank == dist.get_rank()  # type: ignore[attr-defined]
        assert isinstance(r.step, int) and isinstance(r.about_rank, int)  # type: ignore[attr-defined]
    return [(r.event, r.getMessage()) for r in records]  # type: ignore[attr-defined]


def test_a_warning_brings_the_stack_if_asked_for(ranks, tmp_path):
    records = ranks(2).run(_stall, tmp_path / "end")[0]
    warnings = [message for event, message in records if event == "stalled"]
    for warning in warnings[:3]:
        assert warning.startswith("[ddpx] rank 0 has waited ")
        assert "missing: rank 1, host " in warning and "phase forward" in warning
        assert len(re.findall(r"\d s\b", warning)) == 1, warning  # one duration
    stacks = [message for event, message in records if event == "stack"]
    for stack in stacks:
        assert stack.startswith("[ddpx] rank 1 is at:\n  File "), stack
        assert stack.count("\n  File ") <= 3, stack
    assert any("in _sleep_in_the_loader\n    _await(end.exists)\n" in text for text in stacks)
    # Back-off: each comes when the wait is twice as long as at the last one, but for rounding.
    waits = [float(re.search(r"has waited (\S+) s", warning)[1]) for warning in warnings]
    assert len(waits) >= 3 and waits[0] >= _WARN_S
    assert all(later > 2 * earlier - 0.16 for earlier, later in pairwise(waits)), waits
    (over,) = [message for event, message in records if event == "stall_over"]
    back = re.fullmatch(r"\[ddpx\] rank 1 is back after (\S+) s", over)
    assert back and float(back[1]) >= waits[-1], over


def _status() -> list[ddpx.RankStatus]:
    model = ReducerDDP(nn.Linear(2, 2))
    status = ddpx.peer_status(model)
    dist.barrier()
    return status


def test_status_of_all_ranks_marks_the_caller(ranks):
    for rank, status in enumerate(ranks(2).run(_status)):
        assert [each.rank for each in status] == [0, 1]
        assert [each.is_this_rank for each in status] == [rank == 0, rank == 1]
        assert all(each.alive and each.doing and each.pid for each in status)


def _copy_on_one_rank() -> list[str]:
    """As for an average of weights that only rank 0 keeps."""
    torch.manual_seed(0)
    first = ReducerDDP(nn.Linear(4, 4))
    if dist.get_rank() == 0:
        copied = copy.deepcopy(first)
        assert copied.module is not first.module
    others = [ReducerDDP(nn.Linear(4, 4)) for _ in range(2)]
    errors = []
    for model in (first, *others, *(copy.deepcopy(other) for other in others)):
        for number in range(3):
            try:
                model(torch.full((1, 4), float(number + 1))).pow(2).sum().backward()
            except RuntimeError as error:
                errors.append(str(error))
    return errors


def test_a_copy_on_one_rank_is_no_mismatch(ranks):
    """Wrappers that come after it are not taken for each other."""
    assert ranks(2).run(_copy_on_one_rank) == [[], []]


def _idle(make: str) -> tuple[str, list[str]]:
    """Ranks that wait for nobody, long enough for a warning."""
    error = ""
    with _logged() as records:
        try:
            model = ReducerDDP(nn.Linear(2, 2 + (dist.get_rank() if make == "fails" else 0)))
            if make == "forward":
                model(torch.ones(1, 2))
        except RuntimeError as caught:
            error = str(caught)
        ddpx.set_stall_timeout(warn=_WARN_S)
        time.sleep(3 * _WARN_S)
        _be_patient()
        dist.barrier()
    return error, _events(records)


@pytest.mark.parametrize("make", ["fails", "succeeds", "forward"])
def test_who_waits_for_nobody_is_not_stalled(ranks, make):
    for error, events in ranks(2).run(_idle, make):
        assert ("ranks differ" in error) == (make == "fails")
        assert set(events) <= {"stack"}  # of a test before, whose last one may come now


@pytest.mark.parametrize(("switch", "kept"), [("0", "True"), ("1", "False")])
def test_the_hook_for_uncaught_exceptions_is_kept_if_asked(switch: str, kept: str) -> None:
    code = "import sys, ddpx; print(sys.excepthook is sys.__excepthook__)"
    env = {**os.environ, "DDPX_EXCEPTHOOK": switch}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == kept, done.stderr


def _construct() -> float:
    """Seconds for the first wrapper of a new group."""
    group = dist.new_group()
    dist.barrier(group)
    start = time.monotonic()
    ReducerDDP(nn.Linear(2, 2), process_group=group)
    return time.monotonic() - start


def test_a_construction_waits_for_no_deadline(ranks):
    """Also where many ranks share few cores. One attempt of ten is enough: others use the cores."""
    assert any(max(ranks(16).run(_construct)) < 0.8 for _ in range(10))


def _meet() -> int:
    model = ReducerDDP(nn.Linear(2, 2), process_group=dist.new_group())
    return len(ddpx.peer_status(model))


def test_ranks_know_each_other_after_a_construction(ranks):
    assert ranks(3).run(_meet) == [3, 3, 3]
