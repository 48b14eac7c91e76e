"""A setting that one rank makes alone, after all ranks have wrapped the same model.

The ranks then make different collective calls, and wait for each other.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fault_ranks import let_meet, mark, run_ranks
from mistakes import Outcome, outcome_when_all_end
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddpx
from ddpx import ReducerDDP

pytestmark = pytest.mark.timeout(90)
# Nominally 5 s. Neighbours of the tests may hold a rank up.
DEADLINE_S = 8.0

SETTINGS: dict[str, Callable[[nn.Module], None]] = {
    "hook": lambda model: ddpx.register_comm_hook(model, None, default_hooks.allreduce_hook),
    "built-in hook": lambda model: ddpx.register_builtin_comm_hook(
        model, dist.BuiltinCommHookType.ALLREDUCE
    ),
    "fused optimizer": lambda model: ddpx.register_fused_optim(model, torch.optim.SGD, 0.1),
    "static graph": ddpx.set_static_graph,
    "check": ddpx.set_check_finite,
}
HOOK = "rank {odd} has a communication hook, and rank {even} has none"
REPORTS = {
    "hook": HOOK,
    "built-in hook": HOOK,
    "fused optimizer": HOOK,
    "static graph": "rank {odd} has a static graph, and rank {even} does not",
    "check": "rank {odd} checks that gradients are finite, and rank {even} does not",
}


def _train(setting: str, odd: int, replicated: bool) -> Outcome:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = ddpx.replicate(module) if replicated else ReducerDDP(module)
    let_meet(ddpx.as_ddp(model))
    if dist.get_rank() == odd:
        SETTINGS[setting](model)
    mark("fault")

    def train() -> None:
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()

    return outcome_when_all_end(train)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "world_size, odd, replicated", [(2, 1, False), (2, 0, True), (3, 1, False)]
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_of_one_rank(setting: str, world_size: int, odd: int, replicated: bool) -> None:
    endings = run_ranks(world_size, _train, setting, odd, replicated)
    start_s = min(ending.marks["fault"] for ending in endings)
    for ending in endings:
        assert isinstance(ending.value, Outcome), endings
        assert ending.value.kind == "RankMismatch", ending
        assert ending.value.at_s - start_s < DEADLINE_S, ending
    (report,) = {ending.value.text.partition("] ")[2].partition(". ")[0] for ending in endings}
    other = "|".join(str(rank) for rank in range(world_size) if rank != odd)
    expected = REPORTS[setting].format(odd=odd, even=f"({other})")
    assert re.fullmatch(rf"{expected}, in step [01]", report), report


def _slow_allreduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    time.sleep(DEADLINE_S if bucket.is_last() else 0)
    return default_hooks.allreduce_hook(None, bucket)


def _train_with_a_slow_hook() -> bool:
    model = ReducerDDP(nn.Linear(4, 4))
    let_meet(model)
    if dist.get_rank() == 1:
        model.register_comm_hook(None, _slow_allreduce)
    model(torch.ones(2, 4)).sum().backward()
    return True


def test_matching_calls_are_no_error() -> None:
    """The hook calls the all-reduce that the other rank makes without a hook, as with DDP.

    The hook takes a long time, for which the other rank waits.
    """
    endings = run_ranks(2, _train_with_a_slow_hook, environment={"DDPX_TRANSPORT": "group"})
    assert [ending.value for ending in endings] == [True, True], endings
