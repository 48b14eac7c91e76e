"""What the watch over ranks says of ranks that live: warnings, stacks, and when it says nothing."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx import ReducerDDP

_WARN_S = 0.3


def _be_patient() -> None:
    ddpx.set_patience(warn_s=10, raise_s=math.inf, stacks=False)


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


def _sleep_in_the_loader(seconds: float) -> None:
    time.sleep(seconds)


def _wait_in_the_loader() -> None:
    dist.barrier()  # here it is
    dist.barrier()  # until it was asked


def _ask_for_a_stack() -> str | None:
    model = ReducerDDP(nn.Linear(2, 2))
    if dist.get_rank() == 1:
        _wait_in_the_loader()
        return None
    dist.barrier()
    stack = ddpx.stack_of(model, 1, timeout_s=20)
    dist.barrier()
    return stack


def test_stack_of_a_rank(ranks):
    stack = ranks(2).run(_ask_for_a_stack)[0]
    first_thread = stack.split("\nthread ")[0]
    assert first_thread.startswith("thread MainThread:") and "_wait_in_the_loader" in first_thread


def _stall() -> list[tuple[str, int, str]]:
    with _logged() as records:
        model = ReducerDDP(nn.Linear(2, 2))
        ddpx.set_patience(warn_s=_WARN_S, stacks=True)
        loss = model(torch.ones(1, 2)).sum()
        if dist.get_rank() == 1:
            _sleep_in_the_loader(2.4)
        loss.backward()
        deadline = time.monotonic() + 5 * (dist.get_rank() == 0)
        while "stall_over" not in _events(records) and time.monotonic() < deadline:
            time.sleep(0.05)
    return [(r.event, r.about_rank, r.getMessage()) for r in records]  # type: ignore[attr-defined]


def test_a_warning_brings_the_stack_if_asked_for(ranks):
    records = ranks(2).run(_stall)[0]
    warning = next(message for event, _, message in records if event == "stalled")
    assert "missing: rank 1, host " in warning and "phase forward" in warning
    stack = next(message for event, _, message in records if event == "stack")
    assert stack.startswith("rank 1 is at: ") and "_sleep_in_the_loader" in stack
    # Back-off: about 0.3 s, 0.9 s and 2.1 s after the wait began.
    assert [event for event, _, _ in records].count("stalled") in (2, 3, 4)
    assert "stall_over" in [event for event, _, _ in records]


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
        ddpx.set_patience(warn_s=_WARN_S)
        time.sleep(3 * _WARN_S)
        _be_patient()
        dist.barrier()
    return error, _events(records)


@pytest.mark.parametrize("make", ["fails", "succeeds", "forward"])
def test_who_waits_for_nobody_is_not_stalled(ranks, make):
    for error, events in ranks(2).run(_idle, make):
        assert ("these differ" in error) == (make == "fails")
        assert set(events) <= {"stack"}  # of a test before, whose last one may come now
