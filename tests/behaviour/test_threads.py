"""Other threads use a wrapper while it waits for communication. There is no deadlock."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from slow_ddp import MODES, SMALL_CAP, Net, check_steps, error_of, make_pair, on_ranks, plain_step
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpx import _C, ReducerDDP


def _recording() -> _C.Recording:
    return _C.Recording(64, torch.device("cpu"), 0)


def _look(model: ReducerDDP) -> Any:
    reducer = model.reducer
    # Settings of the next step, and calls that are allowed at any time.
    reducer.set_divisor(None)
    reducer.set_after_sync(lambda: None)
    reducer.remove_recording(_recording())
    with contextlib.suppress(RuntimeError):  # no param is sparse
        reducer.set_sparse_rows({0: torch.tensor([0])})
    with contextlib.suppress(RuntimeError):  # refused within a backward
        reducer.set_check_finite(False)
    return reducer.phase, model._get_ddp_logging_data(), reducer.plan.buckets, reducer.used_by_ranks


def _in_a_continuation(
    model: ReducerDDP, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The continuation runs on a thread of the backend while backward waits for its result."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)

    def average(done: Any) -> torch.Tensor:
        _look(model)
        return done.value()[0].div_(dist.get_world_size())

    return work.get_future().then(average)


def _in_a_thread(model: ReducerDDP, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook itself waits for a thread."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(_look(model)), daemon=True)
    thread.start()
    thread.join(10.0)
    assert seen, "the thread that looks at the wrapper is stuck"
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))


HOOKS: dict[str, Callable[..., torch.futures.Future[torch.Tensor]]] = {
    "continuation": _in_a_continuation,
    "thread": _in_a_thread,
}


def _check(hook: str, mode: str) -> None:
    ours, slow = make_pair(Net, mode, SMALL_CAP)
    ours.register_comm_hook(ours, HOOKS[hook])
    check_steps(ours, slow, plain_step)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("mode", MODES)
def test_a_hook_may_look_at_the_wrapper_from_another_thread(ranks, mode, hook):
    on_ranks(ranks, 2, _check, hook, mode)


def _check_while_waiting() -> None:
    """Rank 1 is late on purpose. Meanwhile a thread of rank 0 uses the wrapper."""
    ours, slow = make_pair(Net, "default")
    check_steps(ours, slow, plain_step, 2)
    looks: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            _look(ours)
            looks.append(1)

    thread = threading.Thread(target=watch, daemon=True)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    if dist.get_rank() == 1:
        # Blocks this rank's gradients within backward.
        ours.register_forward_hook(_held_back)
    loss = ours(x).square().mean()
    thread.start()
    loss.backward()
    stop.set()
    thread.join(10.0)
    assert dist.get_rank() == 1 or len(looks) > 20, f"{len(looks)} looks in half a second"


def _held_back(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda grad: time.sleep(0.5))


def test_a_thread_may_look_while_backward_waits(ranks):
    on_ranks(ranks, 2, _check_while_waiting)


REFUSED: dict[str, Callable[[ReducerDDP], object]] = {
    "register_comm_hook": lambda model: model.register_comm_hook(None, allreduce_hook),
    "_set_static_graph": lambda model: model._set_static_graph(),
    "set_check_finite": lambda model: model.reducer.set_check_finite(True),
    "add_recording": lambda model: model.reducer.add_recording(_recording()),
}


def _check_refused() -> None:
    """A thread of rank 0 calls while backward waits for rank 1, which waits for that thread."""
    ours, slow = make_pair(Net, "default")
    check_steps(ours, slow, plain_step, 2)
    store = dist.distributed_c10d._get_default_store()
    errors: dict[str, str] = {}

    def call_all() -> None:
        while ours.reducer.phase != _C.Phase.FINALIZING:
            time.sleep(0.01)
        for name, call in REFUSED.items():
            errors[name] = error_of(call, ours)
        store.set("refused", "")

    thread = threading.Thread(target=call_all, daemon=True)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    if dist.get_rank() == 0:
        thread.start()
    loss = ours(x).square().mean()
    if dist.get_rank() == 1:
        loss.register_hook(lambda grad: store.wait(["refused"], timedelta(seconds=20)))
    loss.backward()
    if dist.get_rank() == 0:
        thread.join(10.0)
        assert all("while a backward runs" in errors.get(name, "") for name in REFUSED), errors
    check_steps(ours, slow, plain_step, 2)


def test_what_a_backward_refuses_raises_while_it_waits(ranks):
    on_ranks(ranks, 2, _check_refused)


def _check_reset_from_another_thread() -> None:
    """A thread calls between two gradients, when no thread occupies the reducer."""
    ours, slow = make_pair(Net, "default")
    check_steps(ours, slow, plain_step, 2)
    errors: list[str] = []

    def reset(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: errors.append(error_of(ours.reset)))
        thread.start()
        thread.join(10.0)

    hook = ours.module.first.weight.register_hook(reset)
    ours(torch.randn(3, 6, dtype=torch.float64)).square().mean().backward()
    hook.remove()
    assert len(errors) == 1 and "while a backward runs" in errors[0], errors
    check_steps(ours, slow, plain_step, 2)


def test_reset_raises_while_another_thread_runs_a_backward(ranks):
    on_ranks(ranks, 2, _check_reset_from_another_thread)
