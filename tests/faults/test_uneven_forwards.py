"""One rank makes another number of forwards of a module with buffers.

Each forward takes over rank 0's buffers, so ranks then wait for each other in different calls.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from fault_ranks import let_meet, mark, run_ranks, text_of
from mistakes import Outcome, outcome_when_all_end
from torch import nn

from ddpx import ReducerDDP

pytestmark = pytest.mark.timeout(90)
# Nominally a second. Neighbours of the tests may hold a rank up.
DEADLINE_S = 2.0


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def _train(odd: int, num_extra: int) -> Outcome:
    model = ReducerDDP(_net())
    let_meet(model)

    def train() -> None:
        for number in range(5):
            if number == 2:
                mark("fault")
            for _ in range(num_extra if number == 2 and dist.get_rank() == odd else 0):
                model(torch.ones(2, 4))
            model(torch.ones(2, 4)).sum().backward()

    return outcome_when_all_end(train)


@pytest.mark.parametrize("transport", ["auto", "group"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("world_size, odd, num_extra", [(2, 0, 1), (2, 1, 1), (3, 2, 2)])
def test_another_forward(
    world_size: int, odd: int, num_extra: int, backend: str, transport: str
) -> None:
    endings = run_ranks(
        world_size,
        _train,
        odd,
        num_extra,
        backend=backend,
        environment={"DDPX_TRANSPORT": transport},
    )
    start_s = min(ending.marks["fault"] for ending in endings)
    for rank, ending in enumerate(endings):
        assert isinstance(ending.value, Outcome), (rank, ending)
        assert ending.value.kind == "RankMismatch", (rank, ending)
        assert ending.value.at_s - start_s < DEADLINE_S, (rank, ending)
        if backend == "shm":  # the backend compares calls
            assert "ranks called different operations: " in ending.value.text, (rank, ending)
            continue
        words = f"rank {odd} has begun 1 more forward than rank "
        assert words in ending.value.text, (rank, ending)
        assert "Call model.module(...) for a forward of one rank alone" in ending.value.text


def _train_legally(case: str) -> str:
    """Ranks make the same forwards in the same order, and one rank is slow."""
    models = [ReducerDDP(_net()) for _ in range(2)]
    rank = dist.get_rank()
    late_s = 0.3 * (rank == 1)
    try:
        if case == "uneven inputs":
            with models[0].join():
                for _ in range(3 + rank):
                    time.sleep(late_s)
                    models[0](torch.ones(2, 4)).sum().backward()
            return ""
        for number in range(3):
            a = models[0](torch.ones(2, 4)).sum()
            if case == "several forwards":
                a = a + models[0](torch.ones(2, 4)).sum()
            if case == "wrappers in turn":
                models[1](torch.ones(2, 4)).sum().backward()
                a = a + models[0](torch.ones(2, 4)).sum()
            time.sleep(late_s)
            a.backward()
            if case == "evaluation" and number == 1:
                with torch.no_grad():  # as in DDP, only the first one synchronizes buffers
                    for _ in range(1 + rank):
                        models[0](torch.ones(2, 4))
    except Exception as error:
        return text_of(error)
    return ""


class _SlowBuffers(ReducerDDP):
    """Rank 1 is slow after rank 0 has sent its buffers. Rank 0 waits for gradients meanwhile."""

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        super()._sync_module_buffers(authoritative_rank)
        time.sleep(1.0 * (dist.get_rank() == 1))


def _train_after_uneven_inputs() -> str:
    """Ranks without inputs take part in the synchronization of buffers, too."""
    model = ReducerDDP(_net())
    try:
        with model.join():
            for _ in range(2 + 2 * dist.get_rank()):
                model(torch.ones(2, 4)).sum().backward()
        other = _SlowBuffers(_net())
        for _ in range(3):
            other(torch.ones(2, 4)).sum().backward()
    except Exception as error:
        return text_of(error)
    return ""


def test_slow_buffers_after_uneven_inputs() -> None:
    endings = run_ranks(2, _train_after_uneven_inputs)
    assert [ending.value for ending in endings] == ["", ""], endings


@pytest.mark.parametrize("transport", ["auto", "group"])
@pytest.mark.parametrize(
    "case", ["several forwards", "wrappers in turn", "evaluation", "uneven inputs"]
)
def test_the_same_forwards(case: str, transport: str) -> None:
    endings = run_ranks(2, _train_legally, case, environment={"DDPX_TRANSPORT": transport})
    assert [ending.value for ending in endings] == ["", ""], endings
