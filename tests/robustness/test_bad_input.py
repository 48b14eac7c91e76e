"""Destroyed groups, several threads, forks, odd arguments: a clear error, and no crash."""

from __future__ import annotations

import inspect
import os
import re
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx import _C, ReducerDDP
from ddpx.testing import RankPool

BACKENDS = ["gloo", "shm"]


@pytest.fixture(params=BACKENDS)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """New ranks for each test, since a test may leave them in any state."""
    with RankPool(2, request.param) as ranks:
        yield ranks


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _step(model: nn.Module) -> None:
    model(torch.ones(3, 8) * (dist.get_rank() + 1)).square().mean().backward()


def _error_of(action: Callable[[], Any]) -> str:
    """The text of the exception that ``action`` raises. Empty if there is none."""
    try:
        action()
    except Exception as error:
        assert not isinstance(error, (AttributeError, AssertionError, SystemError)), error
        return f"{type(error).__name__}: {error}"
    return ""


# ---- groups that are gone ----------------------------------------------------------------------


def _wrap_in_destroyed_group() -> str:
    group = dist.new_group([0, 1])
    dist.barrier()  # both ranks are connected
    dist.destroy_process_group(group)
    return _error_of(lambda: ReducerDDP(_model(), process_group=group))


def test_construction_with_a_destroyed_group(pool: RankPool) -> None:
    for text in pool.run(_wrap_in_destroyed_group, timeout=30):
        assert "ValueError: process_group was destroyed" in text
        assert "new_group(...)" in text


def _train_after_destroying(own_group: bool) -> tuple[str, str]:
    """The errors of a backward, and of a further step, whose group is destroyed."""
    group = dist.new_group([0, 1]) if own_group else None
    model = ReducerDDP(_model(), process_group=group)
    for _ in range(3):
        _step(model)
    loss = model(torch.ones(3, 8)).sum()
    dist.barrier()
    dist.destroy_process_group(group)
    return _error_of(loss.backward), _error_of(lambda: model(torch.ones(3, 8)).sum().backward())


@pytest.mark.parametrize("own_group", [True, False], ids=["own group", "default group"])
def test_training_after_destroying_the_group(pool: RankPool, own_group: bool) -> None:
    """Backends differ: some work until the last reference is released."""
    for texts in pool.run(_train_after_destroying, own_group, timeout=30):
        for text in texts:
            assert re.search(r"^$|\[ddpx rank \d.*(destroyed|closed)", text, re.DOTALL), text


def _change_to_a_group_that_is_gone() -> tuple[str, str]:
    model = ReducerDDP(_model())
    group = dist.new_group([0, 1])
    dist.barrier()
    dist.destroy_process_group(group)
    texts = tuple(
        _error_of(lambda new=new: ddpx.update_process_group(model, new)) for new in (None, group)
    )
    _step(model)  # still over the old group
    return texts


def test_change_to_a_group_that_is_gone(pool: RankPool) -> None:
    for none, destroyed in pool.run(_change_to_a_group_that_is_gone, timeout=30):
        assert none.startswith("TypeError: new_process_group must be a torch.distributed.Process")
        assert destroyed.startswith("ValueError: process_group was destroyed")


# ---- several threads ---------------------------------------------------------------------------

# Errors that a thread may get if its step overlaps with that of another thread.
CLASHES = (
    "got another gradient after its gradient had been packed",
    "while a backward runs",
    "got no gradient in this backward",
)


def _train_from_threads(num_threads: int, num_steps: int, options: dict[str, Any]) -> list[str]:
    """Several threads train one wrapper at once. It communicates although it has one rank."""
    os.environ["DDPX_FORCE_COMM"] = "1"
    model = ReducerDDP(_model(), bucket_cap_mb=0.0005, **options)
    errors: list[str] = []

    def train() -> None:
        for _ in range(num_steps):
            text = _error_of(lambda: _step(model))
            if text:
                errors.append(text)

    threads = [threading.Thread(target=train) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Afterwards a single thread gets the mean.
    model.reducer.reset()
    model.zero_grad()
    _step(model)
    plain = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    _step(model.module)
    for param, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(param.grad, grad)
    return errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str
)
def test_one_wrapper_in_several_threads(backend: str, options: dict[str, Any]) -> None:
    with RankPool(1, backend) as alone:
        (errors,) = alone.run(_train_from_threads, 4, 100, options, timeout=60)
    unclear = [text for text in errors if not any(clash in text for clash in CLASHES)]
    assert not unclear, "\n".join(sorted(set(unclear)))


# ---- fork --------------------------------------------------------------------------------------


def _end_of_child(action: Callable[[], Any]) -> tuple[str, int]:
    """The error of ``action`` in a forked child, and the exit status of the child."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = _error_of(action)
        except BaseException:
            text = traceback.format_exc()
        os.write(theirs, text.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        readable = _readable(pipe.fileno(), 15.0)
        text = pipe.read().decode() if readable else "nothing was said for 15 s"
    if not readable:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text, status


def _forward_without_grads(model: ReducerDDP, loss: torch.Tensor) -> None:
    with torch.no_grad():
        model(torch.ones(3, 8))


def _join(model: ReducerDDP, loss: torch.Tensor) -> None:
    with model.join():
        _step(model)


CALLS_OF_CHILD: dict[str, Callable[[ReducerDDP, torch.Tensor], Any]] = {
    "forward": lambda model, loss: model(torch.ones(3, 8)),
    "forward without grads": _forward_without_grads,
    "record": lambda model, loss: ddpx.record(model).start(),
    "synchronized_grads": lambda model, loss: ddpx.synchronized_grads(
        model, loss, list(model.parameters())
    ),
    "join": _join,
    "construction": lambda model, loss: ReducerDDP(_model()),
}


def _shm_in_forked_child(call: str) -> tuple[str, float]:
    """The error of a call of the script in a child of rank 0, and a sum in the parent.

    The child must not take part in a call in place of its parent.
    """
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(torch.full((1,), 100.0)),
        "through gloo": lambda: dist.reduce(torch.full((1,), 100.0), 0),
    }
    dist.reduce(torch.ones(1), 0)  # connects
    text = _end_of_child(calls[call])[0] if dist.get_rank() == 0 else ""
    total = torch.full((1,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return text, total.item()


@pytest.mark.parametrize("call", ["all_reduce", "through gloo"])
def test_shm_in_a_forked_child(call: str) -> None:
    with RankPool(2, "shm") as ranks:
        results = ranks.run(_shm_in_forked_child, call, timeout=60)
    assert [total for _, total in results] == [3.0, 3.0]
    assert "this process was forked off after the process group was made" in results[0][0]


def _call_in_forked_child(name: str) -> tuple[str, int]:
    """The error of the call in the child, and the child's end. The parent continues to train."""
    module = _model()
    module.register_buffer("buffer", torch.ones(1))  # rank 0 sends it in each forward
    model = ReducerDDP(module)
    for _ in range(3):
        _step(model)

    loss = model(torch.ones(3, 8)).sum()
    text, status = _end_of_child(lambda: CALLS_OF_CHILD[name](model, loss))
    dist.barrier()
    _step(model)
    return text, status


def _readable(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


@pytest.mark.parametrize("name", CALLS_OF_CHILD)
def test_a_forked_child_is_no_rank(pool: RankPool, name: str) -> None:
    for text, status in pool.run(_call_in_forked_child, name, timeout=60):
        assert "forked off" in text
        assert status == 0


# ---- the monitor -------------------------------------------------------------------------------


def _odd_calls_of_the_monitor() -> None:
    monitor = _C.monitor_of(dist.group.WORLD)
    assert monitor is not None
    peer = 1 - dist.get_rank()
    for rank in (-1, 2, 10**6, -(2**31), dist.get_rank()):
        _error_of(lambda rank=rank: monitor.stack_of(rank, timedelta(seconds=0.05)))
    for wrong in (None, "1", 2**40, 1.5, []):
        assert "incompatible function arguments" in _error_of(
            lambda wrong=wrong: monitor.stack_of(wrong, timedelta(0))
        )
    for timeout in (timedelta(0), timedelta(seconds=-1), -timedelta(days=10_000)):
        _error_of(lambda timeout=timeout: monitor.stack_of(peer, timeout))
    for text in ("", "\0", "x" * 100_000, "\N{GRINNING FACE}" * 3000):
        monitor.publish_agreement(text)
    dist.barrier()
    assert len(monitor.ranks()) == 2
    for doing in (*_C.Doing.__members__.values(), _C.Doing(77)):
        monitor.publish(doing)
        monitor.ranks()
    monitor.publish(_C.Doing.OUTSIDE)
    model = ReducerDDP(_model())
    _step(model)


def test_odd_calls_of_the_monitor(pool: RankPool) -> None:
    """The monitor needs a peer, so the fuzz of the bindings cannot test it."""
    pool.run(_odd_calls_of_the_monitor, timeout=60)


# ---- arguments ---------------------------------------------------------------------------------

# Values of the wrong type for every argument, except arguments that accept all such values.
WRONG = [object(), "text", b"x", 1j, {}, torch.ones(2), int, lambda: None]
TAKEN_BY_DDP = {"dim": WRONG, "bucket_cap_mb_list": WRONG[5:6]}  # DDP ignores dim


def _wrong_arguments() -> list[str]:
    """The failures, as sentences."""
    names = list(inspect.signature(ReducerDDP.__init__).parameters)[1:]
    amiss = []
    for name in names:
        taken = [id(value) for value in TAKEN_BY_DDP.get(name, ())]
        for value in (value for value in WRONG if id(value) not in taken):
            given = {name: value} if name == "module" else {"module": _model(), name: value}
            what = f"{name}={value!r}"
            try:
                ReducerDDP(**given)
            except (TypeError, ValueError, RuntimeError) as error:
                if name not in str(error) and not isinstance(error, TypeError):
                    amiss.append(f"{what}: {type(error).__name__} does not name it: {error}")
            except Exception as error:
                amiss.append(f"{what}: {type(error).__name__}: {error}")
            else:
                amiss.append(f"{what} was taken")
    return amiss


def test_wrong_types_are_named() -> None:
    with RankPool(1) as alone:
        (amiss,) = alone.run(_wrong_arguments)
    assert not amiss, "\n".join(amiss)


NO_FLAG = ["False", b"x", 1j, {}, [True], torch.ones(2), int, object()]
NO_CALLABLE = ["text", 1, None, torch.ones(2), {}]
# Functions of the script, each with an argument of the wrong type.
FUNCTIONS: dict[str, tuple[Callable[[ReducerDDP, Any], Any], list[Any]]] = {
    "requires_gradient_sync": (ddpx.set_requires_gradient_sync, NO_FLAG),
    "enabled": (ddpx.set_forward_sync_buffers, NO_FLAG),
    "require_manual_backward_finalization": (ddpx.set_manual_finalization, NO_FLAG),
    "divide_by_initial_world_size": (ddpx.join, NO_FLAG),
    "enable": (lambda model, value: ddpx.join(model, enable=value), NO_FLAG),
    "throw_on_early_termination": (
        lambda model, value: model.join(throw_on_early_termination=value),
        NO_FLAG,
    ),
    "replicate": (lambda model, value: ddpx.patch_ddp(replicate=value), NO_FLAG),
    "patch_ddp() takes a class": (
        lambda model, value: ddpx.patch_ddp(value),
        ["ReducerDDP", None, 1, int, lambda module: module],
    ),
    "post-sync hook must be callable": (
        lambda model, value: ddpx.register_post_sync_hook(model, model.module, value),
        NO_CALLABLE,
    ),
    "location of a buffer hook": (
        lambda model, value: ddpx.register_buffer_comm_hook(model, None, _no_hook, value),
        ["POST_FORWARD", 1, 2, None, True],
    ),
    "_register_fused_optim() takes the class": (
        lambda model, value: ddpx.register_fused_optim(model, value, 0.1),
        ["SGD", None, 1, torch.optim.SGD([torch.ones(1)], 0.1)],
    ),
}


def _no_hook(*_: object) -> None:
    pass


def _wrong_calls() -> list[str]:
    """The failures, as sentences. A refused value must not change the model."""
    amiss = []
    for name, (call, values) in FUNCTIONS.items():
        for value in values:
            model = ReducerDDP(_model())
            try:
                call(model, value)
            except TypeError as error:
                if name not in str(error):
                    amiss.append(f"{name}={value!r}: the error does not name it: {error}")
            except Exception as error:
                amiss.append(f"{name}={value!r}: {type(error).__name__}: {error}")
            else:
                amiss.append(f"{name}={value!r} was taken")
            _step(model)
    return amiss


def test_wrong_types_for_functions() -> None:
    with RankPool(1) as alone:
        (amiss,) = alone.run(_wrong_calls)
    assert not amiss, "\n".join(amiss)
