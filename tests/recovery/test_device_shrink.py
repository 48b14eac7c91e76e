"""Survivors continue where hosts queue all-reduces and go on: over NCCL, and on the late device."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from mortal_jobs import Job, Kill, Report, assert_same, run_job, train
from test_shrink import UNTIL, check

import ddpx

SIZE = 3
PHASES = ("forward", "backward", "in flight", "waiting", "hook", "before optimizer", "optimizer")
FULL_PHASES = ("backward", "waiting", "before optimizer", "hook")
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    ],
    id=f"cuda-nccl-{SIZE}",
)
BACKENDS = {"late": "cpu:gloo,late:late", "cuda": "nccl"}
NO_BUFFERS = {"forward_sync_buffers": False}

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.parametrize("device", ["late", CUDA]),
    pytest.mark.usefixtures("late_library"),
]


def _job(device: str, *kills: Kill, **fields) -> Job:
    return Job(SIZE, BACKENDS[device], UNTIL, kills, device=device, **fields)


@pytest.mark.parametrize("phase", PHASES)
def test_ranks_that_wait_before_the_optimizer(device, phase, request):
    """Any survivor is a source of the right state."""
    if device == "late" and phase in FULL_PHASES and not request.config.getoption("--full"):
        pytest.skip("on the late device, this phase runs with --full")
    dies = PHASES.index(phase) % SIZE
    job = _job(
        device, Kill(dies, 2, phase), with_hook=phase == "hook", options=NO_BUFFERS, waits=True
    )
    for report in check(job).values():
        assert report.shrunk[0].lost == (dies,)
        assert report.shrunk[0].step in (2, 3)


def test_rank_0_is_the_source_of_broadcast_buffers(device):
    reports = check(_job(device, Kill(2, 2, "in flight"), waits=True))
    assert [reports[rank].shrunk[0].caught_up for rank in (0, 1)] == [False, True]


def test_another_group_has_a_call_that_cannot_end(device):
    job = _job(device, Kill(1, 2, "in flight"), waits=True, options=NO_BUFFERS, other_group=True)
    for report in check(job).values():
        assert report.shrunk[0].lost == (1,)


def test_two_losses_after_each_other(device):
    kills = (Kill(0, 1, "in flight"), Kill(2, 4, "backward"))
    reports = check(_job(device, *kills, options=NO_BUFFERS, waits=True))
    assert [shrunk.lost for shrunk in reports[1].shrunk] == [(0,), (1,)]  # rank 2 was rank 1 then


def test_a_loss_after_many_fast_steps(device):
    job = _job(device, Kill(1, 24, "in flight"), options=NO_BUFFERS, waits=True)
    for report in check(replace(job, until=27)).values():
        assert report.shrunk[0].step in (24, 25)


def _read_before_the_wait(job: Job, rank: int) -> Report:
    wait = ddpx.wait_for_gradients

    def read_and_wait(model: ddpx.ReducerDDP) -> None:
        model.module.first.weight.grad.sum().item()  # as a scaler or clipping does
        wait(model)

    ddpx.wait_for_gradients = read_and_wait
    return train(job, rank)


def test_a_script_that_reads_gradients_before_the_wait(device):
    job = _job(device, Kill(1, 2, "in flight"), options=NO_BUFFERS, waits=True)
    for report in run_job(job, _read_before_the_wait).values():
        assert report.shrunk[0].step in (2, 3)


def _train_or_give_up(job: Job, rank: int) -> Report | str:
    try:
        return train(job, rank)
    except ddpx.RankError:
        raise
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("phase", ["backward", "in flight", "before optimizer"])
def test_an_optimizer_behind_an_aborted_sum(device, phase):
    """Either all survivors have the right state, or all point to the checkpoint."""
    job = _job(device, Kill(2, 2, phase), options=NO_BUFFERS)
    results = run_job(job, _train_or_give_up)
    texts = [result for result in results.values() if isinstance(result, str)]
    if texts:
        assert len(texts) == len(results), results
        assert all("no survivor has parameters that are known to be right" in t for t in texts)
        assert all("checkpoint" in text for text in texts)
        return
    first = results[0]
    for report in results.values():
        assert_same(report.states, first.states)
    step, state = first.shrunk[0].step, first.states[0]
    undisturbed = replace(job, kills=(), until=step)
    assert_same(run_job(undisturbed)[0].states[-1], state)


def _without_the_watchdog(job: Job, rank: int) -> Report | str:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"  # torch's default
    return _train_or_give_up(job, rank)


def test_the_watchdog_of_torch_must_be_off(device):
    if device == "late":
        pytest.skip("the late device has no watchdog that ends processes")
    job = _job(device, Kill(2, 2, "forward"), options=NO_BUFFERS, waits=True)
    for text in run_job(job, _without_the_watchdog).values():
        assert isinstance(text, str)
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING is not 0" in text
        assert "--keep-survivors" in text
