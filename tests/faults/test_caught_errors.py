"""One rank alone meets an error in a step, and its script catches the error.

The process lives on, so that no other sign tells the ranks that wait for this rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_ranks import (
    Ending,
    Log,
    announce,
    await_announcement,
    let_meet,
    mark,
    run_ranks,
    text_of,
)
from mistakes import Outcome, outcome_when_all_end
from torch import nn
from torch.nn import functional

import ddpx
from ddpx import ReducerDDP

pytestmark = pytest.mark.timeout(90)
# Nominally a second. Neighbours of the tests may hold a rank up.
DEADLINE_S = 2.0
STEP = 2


def _odd() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(8, 4))
        self.register_buffer("num_calls", torch.zeros(1))
        self.last = nn.Linear(4, 4)
        self.sparse = False
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.fails:
            raise ValueError("no such sample")
        return self.last(functional.embedding(x, self.table, sparse=self.sparse))


def _raise(*_: Any) -> None:
    raise ValueError("no such sample")


def _sparse_gradient(model: ReducerDDP) -> None:
    model.module.sparse = True


def _error_in_hook_of_a_gradient(model: ReducerDDP) -> None:
    model.module.last.weight.register_hook(_raise)


def _error_in_hook_of_the_last_gradient(model: ReducerDDP) -> None:
    """The bucket of the other parameters may be in flight."""
    model.module.table.register_hook(_raise)


def _error_in_hook_after_the_step(model: ReducerDDP) -> None:
    model.register_post_sync_hook(model, _raise)


def _error_in_communication_hook(model: ReducerDDP) -> None:
    model.register_comm_hook(None, lambda state, bucket: _raise())


def _changed_dtype(model: ReducerDDP) -> None:
    model.double()


def _unfrozen(model: ReducerDDP) -> None:
    model.module.last.bias.requires_grad_(True)


# What the last rank does before the step, and a part of the cause that the others report.
FAULTS: dict[str, tuple[Callable[[ReducerDDP], None], str]] = {
    "sparse gradient": (_sparse_gradient, "the gradient of parameter 'table' is a sparse"),
    "gradient hook": (_error_in_hook_of_a_gradient, "no such sample"),
    "last gradient hook": (_error_in_hook_of_the_last_gradient, "no such sample"),
    "post-sync hook": (_error_in_hook_after_the_step, "no such sample"),
    "dtype": (_changed_dtype, "changed dtype, device or shape"),
    "unfrozen": (_unfrozen, "did not require a gradient when the module was wrapped"),
}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def _step(model: ReducerDDP) -> None:
    model.zero_grad()
    model(torch.arange(3)).sum().backward()


def _train(fault: str, mode: str, front: Callable[..., Any] = ReducerDDP) -> Outcome:
    module = _Net()
    module.last.bias.requires_grad_(False)
    model = front(module, bucket_cap_mb=1e-5, **MODES[mode])
    let_meet(ddpx.as_ddp(model))

    def train() -> None:
        for number in range(10):
            if number == STEP:
                mark("fault")
                if _odd():
                    FAULTS[fault][0](model)
            _step(model)

    return outcome_when_all_end(train)


def _check(endings: list[Ending], cause: str) -> None:
    start_s = min(ending.marks["fault"] for ending in endings)
    for rank, ending in enumerate(endings):
        assert isinstance(ending.value, Outcome), (rank, ending)
        assert ending.value.at_s - start_s < DEADLINE_S, (rank, ending)
        assert cause in ending.value.text, (rank, ending)
    last = len(endings) - 1
    for rank, ending in enumerate(endings[:last]):
        assert ending.value.kind == "RankFailure", (rank, ending)
        assert f"rank {last} (host" in ending.value.text, (rank, ending)
        assert "raised an error in a step" in ending.value.text, (rank, ending)
    assert endings[last].value.kind != "RankFailure", endings[last]


@pytest.mark.parametrize("transport", ["auto", "group"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", FAULTS)
def test_peers_report_the_error(fault: str, mode: str, transport: str) -> None:
    world = 3 if mode == "default" else 2
    endings = run_ranks(world, _train, fault, mode, environment={"DDPX_TRANSPORT": transport})
    _check(endings, FAULTS[fault][1])


def test_without_a_wrapper() -> None:
    """The hook before forward raises."""
    _check(run_ranks(2, _train, "dtype", "default", ddpx.replicate), FAULTS["dtype"][1])


def test_over_shm() -> None:
    endings = run_ranks(2, _train, "dtype", "default", backend="shm")
    _check(endings, FAULTS["dtype"][1])


# ---- manual finalization -------------------------------------------------------------------------

# What the last rank does before its first step.
AT_THE_END: dict[str, Callable[[ReducerDDP], None]] = {
    "communication hook": _error_in_communication_hook,  # runs at the end of backward
    "post-sync hook": _error_in_hook_after_the_step,  # runs in finalize_backward()
}


def _finalize_by_hand(fault: str) -> Outcome:
    model = ReducerDDP(_Net())
    model.require_manual_backward_finalization = True
    let_meet(model)
    mark("fault")
    if _odd():
        AT_THE_END[fault](model)

    def train() -> None:
        for _ in range(3):
            _step(model)
            model.finalize_backward()

    return outcome_when_all_end(train)


@pytest.mark.parametrize("fault", AT_THE_END)
def test_manual_finalization(fault: str) -> None:
    _check(run_ranks(2, _finalize_by_hand, fault), "no such sample")


# ---- ranks without batches -----------------------------------------------------------------------


def _run_out_of_batches() -> Outcome:
    """The last rank has one batch. Its communication hook raises in the next step of the others."""
    model = ReducerDDP(_Net())
    num_batches = 1 if _odd() else 3
    num_done = 0

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if num_done == num_batches:
            _raise()
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    let_meet(model)
    mark("fault")

    def train() -> None:
        nonlocal num_done
        with model.join():
            for _ in range(num_batches):
                _step(model)
                num_done += 1

    return outcome_when_all_end(train)


def test_a_rank_without_batches() -> None:
    _check(run_ranks(2, _run_out_of_batches), "no such sample")


# ---- scripts that train on -----------------------------------------------------------------------


def _skip_a_batch(pause_s: float, where: str) -> tuple[int, str]:
    """The last rank, or every rank, drops the batch of a step, and trains on after a pause.

    Returns the number of steps, and the warnings.
    """
    log = Log()
    module = _Net()
    model = ReducerDDP(module, forward_sync_buffers=False)
    let_meet(model)
    for number in range(6):
        if number == STEP and (_odd() or where == "everywhere"):
            module.fails = True
            with suppress(ValueError):
                _step(model)
            module.fails = False
            time.sleep(pause_s)
        _step(model)
    return model.reducer.num_steps, " ".join(log.texts)


@pytest.mark.parametrize(("pause_s", "where"), [(0.0, "last"), (3.0, "last"), (1.5, "everywhere")])
def test_no_report_if_the_script_trains_on(pause_s: float, where: str) -> None:
    """After an error of the module's own code, the script has time to try again."""
    endings = run_ranks(2, _skip_a_batch, pause_s, where, environment={"DDPX_STALL_WARN": "1"})
    for ending in endings:
        assert ending.value[0] == 6, ending
    warns = "which raised ValueError: no such sample" in endings[0].value[1]
    assert warns == (pause_s > 2), endings[0]


def _drop_a_backward(pause_s: float) -> int:
    """Every rank drops a step whose backward raises. The last rank trains on after a pause."""
    model = ReducerDDP(_Net(), forward_sync_buffers=False)
    let_meet(model)
    for number in range(6):
        if number == STEP:
            handle = model.module.last.weight.register_hook(_raise)
            with pytest.raises(ValueError, match="no such sample"):
                _step(model)
            handle.remove()
            time.sleep(pause_s if _odd() else 0)
        _step(model)
    return model.reducer.num_steps


def test_no_report_if_every_rank_met_the_error() -> None:
    for ending in run_ranks(3, _drop_a_backward, 2.5):
        assert ending.value == 6, ending


def _evaluate_alone() -> tuple[int, str]:
    """An error in an evaluation without gradients is no error of a step."""
    log = Log()
    module = _Net()
    model = ReducerDDP(module, forward_sync_buffers=False)
    let_meet(model)
    for number in range(4):
        if number == STEP and _odd():
            module.fails = True
            with torch.no_grad(), suppress(ValueError):
                model(torch.arange(3))
            module.fails = False
            time.sleep(2)
        _step(model)
    return model.reducer.num_steps, " ".join(log.texts)


def test_no_report_of_an_evaluation() -> None:
    for ending in run_ranks(2, _evaluate_alone, environment={"DDPX_STALL_WARN": "1"}):
        assert ending.value[0] == 4 and "no such sample" not in ending.value[1], ending


def _come_back_late() -> tuple[str, str]:
    """The rank that the others gave up raises, too, when it comes back."""
    module = _Net()
    model = ReducerDDP(module)
    let_meet(model)
    _step(model)
    if _odd():
        model.double()
        with suppress(RuntimeError):
            _step(model)
        model.float()
        await_announcement("given up")
    try:
        _step(model)
    except ddpx.RankFailure as failure:
        announce("given up")
        return type(failure).__name__, text_of(failure)
    return "", ""


def test_a_rank_that_comes_back_late() -> None:
    texts = [ending.value for ending in run_ranks(2, _come_back_late)]
    assert all(kind == "RankFailure" for kind, _ in texts), texts
    assert "this rank is the lost one, and the other ranks have given it up" in texts[1][1], texts
