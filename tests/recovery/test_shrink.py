"""Survivors of a lost rank continue without it, like a job that was started with that many
ranks."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mortal_jobs import LATE, PHASES, SHRINK_PHASES, Job, Kill, Report, assert_same, run_job
from short_search import short_search
from torch import nn

import ddpx
from ddpx.elastic.shrink import move_to

UNTIL = 6


def check(job: Job) -> dict[int, Report]:
    """Compares each stretch between two losses with a new job, bit for bit.

    The new job has as many ranks, and starts from the state on which the survivors agreed.
    """
    reports = run_job(job)
    survivors = sorted(reports)
    first = reports[survivors[0]]
    for rank, report in reports.items():
        assert len(report.shrunk) == len(report.errors) == len(first.shrunk), report.errors
        for mine, theirs in zip(report.shrunk, first.shrunk, strict=True):
            assert replace(mine, rank=0, caught_up=False) == replace(
                theirs, rank=0, caught_up=False
            )
            assert mine.lost and mine.world_size == len(mine.survivors)
        assert report.shrunk[-1].world_size == len(survivors)
        assert report.shrunk[-1].rank == survivors.index(rank)
        for mine, theirs in zip(report.states, first.states, strict=True):
            assert_same(mine, theirs, f"rank {rank}")
        for kill in job.kills:
            assert any(f"rank {kill.rank}" in error for error in report.errors) or (
                len(job.kills) > 1
            ), report.errors
    worlds = [job.world_size, *(shrunk.world_size for shrunk in first.shrunk)]
    steps = [0, *(shrunk.step for shrunk in first.shrunk), job.until]
    starts = [None, *zip(steps[1:], first.states, strict=False)]
    for i, world_size in enumerate(worlds):
        stretch = replace(
            job,
            world_size=world_size,
            kills=(),
            stop_before_optimizer=None,
            start=starts[i],
            until=steps[i + 1],
        )
        fresh = run_job(stretch)
        assert_same(fresh[0].states[-1], first.states[i], f"stretch {i}")
        if i == len(worlds) - 1:
            for new_rank, rank in enumerate(survivors):
                ours = reports[rank].losses[-len(fresh[new_rank].losses) :]
                assert ours == fresh[new_rank].losses
    return reports


def cases(full: bool) -> list[tuple[str, int, int, str]]:
    """Cases of backend, world size, killed ranks and phase.

    Each phase once with varied other values, or all.
    """
    if full:
        worlds = [(n, dies) for n in (2, 3, 4) for dies in range(n)]
        return [(b, *w, p) for b, w, p in itertools.product(("gloo", "shm"), worlds, PHASES)]
    worlds = [(3, 0), (2, 1), (3, 2), (4, 0), (2, 0), (3, 1), (4, 2)]
    return [(("gloo", "shm")[i % 2], *worlds[i], phase) for i, phase in enumerate(PHASES)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", ["gloo", "shm"] if full else ["shm"])
    if "death" in metafunc.fixturenames:
        every = list(itertools.product(SHRINK_PHASES, (0, 1)))
        every.remove(("decided", 1))
        one_each = [every[i] for i in (1, 2, 3, 6, 7)]
        metafunc.parametrize("death", every if full else one_each, ids=str)
    if "case" in metafunc.fixturenames:
        chosen = cases(full)
        ids = [f"{backend}-{n}-rank{dies}-{phase}" for backend, n, dies, phase in chosen]
        metafunc.parametrize("case", chosen, ids=ids)


def test_kill_in_every_phase(case):
    backend, world_size, dies, phase = case
    job = Job(world_size, backend, UNTIL, (Kill(dies, 2, phase),), with_hook=phase == "hook")
    for report in check(job).values():
        assert report.shrunk[0].lost == (dies,)
        assert report.shrunk[0].step in (2, 3)


def test_after_a_stall(backend):
    reports = check(Job(3, backend, UNTIL, (Kill(1, 2, LATE),)))
    assert all("RankStalled" in error for report in reports.values() for error in report.errors)


def test_survivors_at_different_steps(backend):
    """One rank learns of the loss before its optimizer step.

    It gets the state of the other rank.
    """
    job = Job(3, backend, UNTIL, (Kill(1, 2, "before optimizer"),), stop_before_optimizer=2)
    reports = check(job)
    assert [reports[rank].shrunk[0].caught_up for rank in (0, 2)] == [False, True]
    assert reports[0].shrunk[0].step == 3


def test_two_losses_after_each_other(backend):
    kills = (Kill(0, 1, "in flight"), Kill(2, 4, "backward"))
    reports = check(Job(4, backend, UNTIL, kills))
    assert [shrunk.lost for shrunk in reports[1].shrunk] == [(0,), (1,)]


def test_two_losses_at_once(backend):
    kills = (Kill(0, 2, "backward"), Kill(3, 2, "in flight"))
    reports = check(Job(4, backend, UNTIL, kills))
    assert reports[1].shrunk[-1].world_size == 2


def test_loss_while_shrinking(death):
    """A loss during shrinking, also of the leading rank.

    A rank that dies after it is ready is left out. If all others are ready before they can know of
    the death, the new group detects it.
    """
    phase, rank = death
    kills = (Kill(3, 2, "in flight"), Kill(rank, 2, phase))
    reports = check(Job(4, "shm", UNTIL, kills, stop_before_optimizer=None))
    worlds = [shrunk.world_size for shrunk in reports[2].shrunk]
    assert worlds == [2] or (phase == "ready" and worlds == [3, 2])


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_modes(options):
    check(Job(3, "shm", UNTIL, (Kill(1, 3, "in flight"),), options=options))


@pytest.mark.parametrize("phase", ["forward", "in flight"])
def test_without_a_wrapper(phase):
    check(Job(3, "shm", UNTIL, (Kill(1, 2, phase),), front=ddpx.replicate))


_SEARCHES = short_search()


def _searching(module: nn.Module, bucket_cap_mb: float, **options: Any) -> ddpx.ReducerDDP:
    """A wrapper that searches its bucket plan. All searches of this process are short."""
    _SEARCHES.__enter__()
    return ddpx.ReducerDDP(module, bucket_cap_mb="auto", **options)


@pytest.mark.parametrize("step", [5, 9], ids=["measuring arrivals", "screening plans"])
def test_during_a_search(step):
    """The survivors search again."""
    check(Job(3, "gloo", step + 34, (Kill(1, step, "in flight"),), front=_searching))


def _check_buffers() -> None:
    """What ranks have begun before the loss has no effect on forwards with the new ranks."""
    model = ddpx.ReducerDDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    def never_ends(state: object, buffers: object) -> list[torch.futures.Future]:
        return [torch.futures.Future()]

    model._register_buffer_comm_hook(None, never_ends)
    with nullcontext() if dist.get_rank() else model.no_sync():
        model(torch.ones(2, 4))
    move_to(model, dist.new_group(), num_steps=0)
    model.buffer_hook = None
    model.module[1].running_mean.fill_(dist.get_rank())
    model.train(False)
    model(torch.ones(2, 4)).sum().backward()
    assert not model.module[1].running_mean.any()


def test_buffers_after_a_loss(ranks):
    ranks(2).run(_check_buffers, timeout=30.0)
