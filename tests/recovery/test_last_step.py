"""A rank is lost in the last step: no survivor uses the results of aborted calls."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest
import torch
from mortal_jobs import Job, Kill, Trainer, die, run_job
from test_device_shrink import BACKENDS, CUDA, SIZE

import ddpx
from ddpx.ddp.fronts.lookup import front_of

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.parametrize("device", ["late", CUDA]),
    pytest.mark.usefixtures("late_library"),
]
LAST = 2


class _Saved(list[torch.Tensor]):
    """The weights that a script would write into its checkpoint."""


def _train_and_save(job: Job, rank: int) -> _Saved | str:
    """A script that calls nothing of ddpx after its last step."""
    trainer = Trainer(job, rank)
    try:
        while trainer.step < job.until:
            trainer._make_step()
            trainer.step += 1
        return _Saved(param.detach().cpu() for param in trainer.net.parameters())
    except ddpx.RankError as error:
        return f"{type(error).__name__}: {error}"


def _with_a_slow_handler(job: Job, rank: int) -> _Saved | str:
    handler = logging.Handler()
    handler.emit = lambda record: time.sleep(1)  # type: ignore[method-assign]
    logger = logging.getLogger("ddpx.health")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return _train_and_save(job, rank)


@pytest.mark.parametrize(
    "last, phase, function",
    [
        (LAST, "backward", _train_and_save),
        (25, "in flight", _train_and_save),  # the host is many steps ahead
        (LAST, "in flight", _with_a_slow_handler),
    ],
    ids=["backward", "in flight", "slow handler"],
)
def test_a_survivor_saves_no_wrong_weights(device, last, phase, function):
    job = Job(SIZE, BACKENDS[device], last + 1, (Kill(1, last, phase),), device=device)
    for result in run_job(job, function).values():
        assert isinstance(result, str), "a survivor saved weights of an aborted step"
        assert result.startswith("RankFailure") and "rank 1 " in result, result


def _train_die_and_save(job: Job, rank: int) -> _Saved | str:
    saved = _train_and_save(job, rank)
    if any(kill.rank == rank for kill in job.kills):
        die()
    time.sleep(1.5)  # survivors detect the loss, which concerns no step
    return saved


def test_a_survivor_with_right_weights_saves_them(device):
    job = Job(SIZE, BACKENDS[device], LAST + 1, (Kill(1, LAST + 1, "end"),), device=device)
    expected = run_job(replace(job, kills=()), _train_and_save)
    for rank, result in run_job(job, _train_die_and_save).items():
        assert isinstance(result, _Saved), result
        for mine, theirs in zip(result, expected[rank], strict=True):
            assert torch.equal(mine, theirs)


def _train_with_a_late_gradient(job: Job, rank: int) -> str:
    """The last gradient comes after the loss of a rank is known, and before the abort."""
    trainer = Trainer(job, rank)
    monitor = front_of(trainer.model).reducer.monitor

    def come_late(_: torch.Tensor) -> None:
        deadline = time.monotonic() + 10
        while trainer.step == LAST - 1 and not monitor.failed and time.monotonic() < deadline:
            time.sleep(0.01)

    trainer.net.first.weight.register_hook(come_late)
    try:
        for trainer.step in range(job.until):
            trainer._make_step()
    except ddpx.RankError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_survivor_can_destroy_its_group(device):
    """NCCL raises at the next launch. destroy_process_group() would raise until the abort."""
    job = Job(SIZE, BACKENDS[device], LAST, (Kill(1, LAST - 1, "backward"),), device=device)
    for result in run_job(job, _train_with_a_late_gradient).values():
        assert result.startswith("RankFailure") and "remote process" in result, result
