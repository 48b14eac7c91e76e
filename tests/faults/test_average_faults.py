"""``average="weights"``: one rank has a wrong weight, or none. The others learn of it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from fault_ranks import let_meet, mark, run_ranks
from mistakes import Outcome, outcome_when_all_end
from torch import nn

import ddpx
from ddpx import ReducerDDP

pytestmark = pytest.mark.timeout(90)
DEADLINE_S = 2.0  # nominally a second; neighbours of the tests may hold a rank up
STEP = 2
# What the last rank passes to set_weight() in a step, and a part of its error.
WEIGHTS: dict[str, tuple[object, str]] = {
    "negative": (-1, "got the weight -1.0"),
    "NaN": (math.nan, "got the weight nan"),
    "a text": ("3", "got the weight '3'"),
    "missing": (None, "this forward has no weight"),
}


def _train(name: str) -> Outcome:
    model = ReducerDDP(nn.Linear(4, 4), average="weights")
    let_meet(model)

    def train() -> None:
        for number in range(10):
            model.zero_grad()
            weight: object = 3
            if number == STEP:
                mark("fault")
                if dist.get_rank() == dist.get_world_size() - 1:
                    weight = WEIGHTS[name][0]
            if weight is not None:
                ddpx.set_weight(model, weight)  # type: ignore[arg-type]
            model(torch.ones(3, 4)).sum().backward()

    return outcome_when_all_end(train)


@pytest.mark.parametrize("name", WEIGHTS)
def test_peers_report_the_error(name: str) -> None:
    endings = run_ranks(2, _train, name)
    start_s = min(ending.marks["fault"] for ending in endings)
    for rank, ending in enumerate(endings):
        assert isinstance(ending.value, Outcome), (rank, ending)
        assert ending.value.at_s - start_s < DEADLINE_S, (rank, ending)
        assert WEIGHTS[name][1] in ending.value.text, (rank, ending)
        assert "rank 1" in ending.value.text and "Linear" in ending.value.text, (rank, ending)
    assert endings[0].value.kind == "RankFailure", endings[0]
    assert endings[1].value.kind != "RankFailure", endings[1]
