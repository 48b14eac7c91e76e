"""``ddpx.shrink`` reports what it cannot do, on every survivor and in time."""

from __future__ import annotations

import math
import re
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from mortal_jobs import Job, Kill, Net, Trainer, die, run_job
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

import ddpx

JOB = Job(3, "shm", 3, (Kill(1, 1, "forward"),))


def _error_of_shrink(model: ddpx.ReducerDDP, *stateful, **options) -> str:
    """The error after the death of rank 1.

    The survivors reach the end of their scripts together.
    """
    if dist.get_rank() == 1:
        die()
    with pytest.raises(ddpx.RankFailure):
        for _ in range(3):
            nn.functional.mse_loss(model(torch.randn(2, 8)), torch.zeros(2, 4)).backward()
    start = time.monotonic()
    try:
        ddpx.shrink(model, *stateful, timeout_s=2, **options)
    except RuntimeError as error:
        assert time.monotonic() - start < 10
        return f"{type(error).__name__}: {error}"
    return ""


def _hook(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    model.register_comm_hook(dist.group.WORLD, allreduce_hook)
    return _error_of_shrink(model)


def _hook_with_state(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    state = SimpleNamespace(process_group=dist.group.WORLD)
    model.register_comm_hook(state, lambda _, bucket: allreduce_hook(None, bucket))
    return _error_of_shrink(model)


def _builtin_hook(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return _error_of_shrink(model)


def _optimizer_in_backward(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    model._register_fused_optim(torch.optim.SGD, 0.1)
    return _error_of_shrink(model)


def _optimizer_applied_in_backward(job: Job, rank: int) -> str:
    net = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    return _error_of_shrink(ddpx.ReducerDDP(net))


def _sharded_optimizer(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    return _error_of_shrink(
        model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    )


def _params_on_a_device(job: Job, rank: int) -> str:
    net = Net()
    # Stands for a real device. Nothing computes with it.
    net.register_parameter("elsewhere", nn.Parameter(torch.empty(1, device="meta")))
    ddpx.ReducerDDP._set_params_and_buffers_to_ignore_for_model(net, ["elsewhere"])
    model = ddpx.ReducerDDP(net)
    error = _error_of_shrink(model)
    assert model.process_group is dist.group.WORLD
    assert model.module.elsewhere.is_meta
    return error


def _several_wrappers(job: Job, rank: int) -> str:
    other = ddpx.ReducerDDP(Net())
    error = _error_of_shrink(ddpx.ReducerDDP(Net()))
    assert other.process_group is dist.group.WORLD
    return error


def _inside_join(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    with pytest.raises(KeyError), model.join():
        error = _error_of_shrink(model)
        raise KeyError  # no rank waits for other ranks at the end of the block
    return error


def _mesh(job: Job, rank: int) -> str:
    return _error_of_shrink(ddpx.ReducerDDP(Net(), device_mesh=init_device_mesh("cpu", (3,))))


def _recording(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    with pytest.raises(KeyError), ddpx.record(model):
        error = _error_of_shrink(model)
        raise KeyError  # no rank waits for other ranks at the end of the block
    return error


def _part_of_the_ranks(job: Job, rank: int) -> str:
    part = dist.new_group([0, 1])
    if rank == 2:
        return "NotImplementedError: process group has 2 of 3"
    return _error_of_shrink(ddpx.ReducerDDP(Net(), process_group=part))


def _nobody_lost(job: Job, rank: int) -> str:
    try:
        ddpx.shrink(ddpx.ReducerDDP(Net()))
    except RuntimeError as error:
        dist.barrier()
        return f"RuntimeError: {error}"
    return ""


# Wrong arguments, and a part of the error.
ARGUMENTS: dict[str, tuple[tuple[object, ...], dict[str, object], str]] = {
    "no state": ((5,), {}, "TypeError: .*got int, which has no state_dict"),
    "a list": (([],), {}, r"TypeError: .*got list, .*shrink\(model, optimizer, scheduler\)"),
    "a number as text": ((), {"step": "3"}, "TypeError: step must be an integer or None"),
    "a fraction": ((), {"step": 1.5}, "TypeError: step must be an integer or None"),
    "a bool": ((), {"step": True}, "TypeError: step must be an integer or None"),
    "a negative step": ((), {"step": -1}, "ValueError: step=-1 is negative"),
    "no number": ((), {"timeout_s": "3"}, "TypeError: timeout_s must be a number of seconds"),
    "NaN": ((), {"timeout_s": float("nan")}, "ValueError: timeout_s=nan"),
}


def _wrong_arguments(job: Job, rank: int) -> dict[str, str]:
    model = ddpx.ReducerDDP(Net())
    if rank == 1:
        die()
    with pytest.raises(ddpx.RankFailure):
        for _ in range(3):
            nn.functional.mse_loss(model(torch.randn(2, 8)), torch.zeros(2, 4)).backward()
    texts = {}
    for name, (stateful, options, _) in ARGUMENTS.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            ddpx.shrink(model, *stateful, **options)
        texts[name] = f"{caught.type.__name__}: {caught.value}"
        assert model.process_group is dist.group.WORLD and dist.get_world_size() == 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timeout = timedelta(seconds=10) if rank == 0 else math.inf
    assert ddpx.shrink(model, optimizer, step=0, timeout_s=timeout).world_size == 2
    return texts


def test_wrong_arguments_change_nothing():
    for texts in run_job(JOB, _wrong_arguments).values():
        for name, (_, _, expected) in ARGUMENTS.items():
            assert re.match(expected, texts[name]), (name, texts[name])


def _survivor_stays_away(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    if rank == 2:
        time.sleep(6)  # the rank is alive, and does not know of the loss yet
        return "RuntimeError: waited did not call ddpx.shrink(): rank 2"
    return _error_of_shrink(model)


CASES = [
    (_hook, "RuntimeError: .*communication hook"),
    (_hook_with_state, "RuntimeError: .*communication hook"),
    (_builtin_hook, "RuntimeError: .*communication hook"),
    (_optimizer_in_backward, "RuntimeError: .*optimizer runs inside backward"),
    (_optimizer_applied_in_backward, "RuntimeError: .*optimizer runs inside backward"),
    (_sharded_optimizer, "RuntimeError: .*ZeroRedundancyOptimizer"),
    (
        _params_on_a_device,
        r"RuntimeError: .*its parameters are on several devices \(cpu, meta\).*checkpoint",
    ),
    (_several_wrappers, "RuntimeError: .*another ReducerDDP"),
    (_inside_join, r"RuntimeError: .*it is inside join\(\)"),
    (_mesh, "RuntimeError: .*it was made with a device_mesh"),
    (_recording, "RuntimeError: .*recorded"),
    (_part_of_the_ranks, "NotImplementedError: .*process group has 2 of 3"),
    (_survivor_stays_away, r"RuntimeError: .*waited .*did not call ddpx\.shrink\(\): rank 2"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__.strip("_"))
def test_error(case):
    function, expected = case
    for rank, error in run_job(JOB, function).items():
        assert re.match(expected, error), f"rank {rank}: {error}"


def test_nobody_is_lost():
    for error in run_job(Job(2, "gloo", 1), _nobody_lost).values():
        assert "no rank of this wrapper's process group is lost" in error


def _calls_in_another_order(job: Job, rank: int) -> str:
    models = [ddpx.ReducerDDP(nn.Linear(32, 32)) for _ in range(2)]
    order = models[::-1] if rank == 1 else models
    with pytest.raises(ddpx.RankMismatch):
        for model in order:
            model(torch.full((2, 32), float(rank))).pow(2).sum().backward()
    try:
        ddpx.shrink(models[0])
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_mismatch_loses_nobody():
    """Without agreement, each rank would continue alone."""
    for error in run_job(Job(2, "shm", 1), _calls_in_another_order).values():
        assert "different collective calls (ddpx.RankMismatch)" in error


class _WithoutOptimizer(Trainer):
    def _shrink(self) -> None:
        with pytest.raises(RuntimeError) as caught:
            ddpx.shrink(self.model, step=self.step, timeout_s=10)
        self.report.errors.append(str(caught.value))
        self.step = self.job.until


def _train_without_optimizer(job: Job, rank: int) -> str:
    return _WithoutOptimizer(job, rank).run().errors[-1]


def test_ranks_at_different_steps_without_the_optimizer():
    job = Job(3, "gloo", 6, (Kill(1, 2, "before optimizer"),), stop_before_optimizer=2)
    for error in run_job(job, _train_without_optimizer).values():
        assert "only some ranks have the right state of step 3" in error
        assert "ddpx.shrink(model, optimizer, scheduler)" in error


def _own_call_fails(job: Job, rank: int) -> str:
    model = ddpx.ReducerDDP(Net())
    if rank == 1:
        die()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(1))
    try:
        ddpx.shrink(model)
    except RuntimeError as error:
        shrunk = ddpx.shrink(model, step=0)
        assert shrunk.world_size == 2 and not shrunk.caught_up
        return str(error)
    return ""


def test_error_of_a_call_of_the_users():
    """Whether the optimizer has made its step is then unknown, unless the user says so."""
    for error in run_job(JOB, _own_call_fails).values():
        assert "Pass step=" in error


def _call_fails_within_a_step(job: Job, rank: int) -> bool:
    """The backward of the step has returned, and the step waits for its finalization."""
    model = ddpx.ReducerDDP(Net())
    model.require_manual_backward_finalization = True
    model(torch.ones(2, 8)).sum().backward()
    dist.barrier()
    if rank == 1:
        die()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(1))
    shrunk = ddpx.shrink(model, step=0)
    model(torch.ones(2, 8) * shrunk.rank).sum().backward()
    model.finalize_backward()
    return torch.equal(model.module.third.bias.grad, torch.full((4,), 2.0))


def test_error_within_a_step_with_manual_finalization():
    assert all(run_job(JOB, _call_fails_within_a_step).values())
