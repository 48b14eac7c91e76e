"""Trainings in which a backward raises, on a device. Each also returns the expected results.

The functions run on every rank, on "late" or "cuda".
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import late_device
import torch
import torch.distributed as dist
from device_models import (
    Pairs,
    accumulate_on,
    backward,
    batch,
    expected_grads,
    layers,
    loss_of,
    make_grads,
    pair_up,
)
from device_ranks import keep_busy
from unused_cases import expected_of_used

from ddpx import _C, ReducerDDP


def fail(grad: torch.Tensor) -> None:
    raise ValueError("on purpose")


class _SlowToDrop:
    """A callback of a backward. It takes 300 ms to drop the callback."""

    def __call__(self) -> None: ...

    def __del__(self) -> None:
        time.sleep(0.3)


@contextlib.contextmanager
def _on_one_core() -> Iterator[int]:
    """Binds the calling thread to a core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield min(cores)
    finally:
        os.sched_setaffinity(0, cores)


def raise_before_the_abort(ours: ReducerDDP, loss: torch.Tensor, last: torch.Tensor) -> bool:
    """Runs a backward that raises when it reaches ``last``, and catches the error.

    Returns true if the abort is not reported to the reducer yet. The report comes 300 ms later. On
    a busy machine, 1 of 20 calls returns false.

    The thread that drops the backward last reports the abort: the caller's or the engine's. The
    engine's thread shares the caller's core, and should run only while the caller sleeps. So the
    caller usually drops the backward first.
    """
    engine_threads = []
    cores = os.sched_getaffinity(0)

    def queue_callback(grad: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(_SlowToDrop())

    with _on_one_core() as core:

        def raise_on_that_core(grad: torch.Tensor) -> None:
            thread = threading.get_native_id()
            engine_threads.append(thread)
            os.sched_setaffinity(thread, {core})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            fail(grad)

        loss.register_hook(queue_callback)  # before the reducer's callback, and dropped before it
        last.register_hook(raise_on_that_core)
        try:
            loss.backward()
        except ValueError:
            pass
        finally:
            for thread in engine_threads:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.sched_setaffinity(thread, cores)
    return ours.reducer.phase == _C.Phase.COLLECTING


def repeats_its_first_backward(device: str, keep: bool = False, **options: Any) -> Pairs:
    """The first backward of rank 0 raises after the last gradient. Rank 0 repeats the step.

    ``keep``: Rank 0 overwrites the gradients with zeros before the abort is reported.
    """
    module = layers(device)
    main = torch.accelerator.current_stream()
    streams = [torch.Stream(device=device) for _ in module.parameters()]
    nodes = [accumulate_on(p, s) for p, s in zip(module.parameters(), streams, strict=True)]
    ours = ReducerDDP(module, **options)
    if keep:
        make_grads(module)

    def clear() -> None:
        ours.zero_grad(set_to_none=not keep)
        for stream in streams:
            stream.wait_stream(main)

    for _ in range(10 if dist.get_rank() == 0 else 0):
        x = batch(device, 0).requires_grad_() * 1  # the node runs after every gradient
        caught_before = raise_before_the_abort(ours, loss_of(ours, x), x)
        for stream in streams:  # torch does this only after a successful backward
            main.wait_stream(stream)
        clear()
        if caught_before:
            break
    else:
        assert dist.get_rank() != 0, "each abort was reported before the error was caught"
    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, loss_of, step)
        clear()
        backward(loss_of(ours, batch(device, step)))
        pairs += pair_up(module, expected)
    assert len(nodes) == len(streams)
    return pairs


# What rank 0 calls after it has caught an error. Without a call, the next forward waits.
CALLS: dict[str, Callable[[ReducerDDP], None]] = {
    "forward": lambda model: None,
    "reset()": lambda model: model.reducer.reset(),
    "set_check_finite()": lambda model: model.reducer.set_check_finite(False),
    "prepare_for_backward()": lambda model: model.reducer.prepare_for_backward(),
}


def raises_after_all_launches(device: str, call: str, **options: Any) -> Pairs:
    """The second backward of rank 0 raises after the last gradient. Its peers finish the step.

    Returns the gradients of the peers in that step, and those of all ranks in the other steps. The
    gradients must be right whether or not the report of the abort came late.
    """
    module = layers(device)
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)
    pairs: Pairs = []
    for step in range(4):
        expected = expected_grads(module, loss_of, step)
        ours.zero_grad()
        x = batch(device, step).requires_grad_() * 1
        loss = loss_of(ours, x)
        if step == 1 and dist.get_rank() == 0:
            raise_before_the_abort(ours, loss, x)
            CALLS[call](ours)
        else:
            backward(loss)
            pairs += pair_up(module, expected)
    return pairs


def slow_looks(device: str) -> contextlib.AbstractContextManager[None]:
    """On the late device: ``set_check_finite()`` takes 60 ms to check the gradients of a bucket."""
    return late_device.slow("_foreach_norm", 60) if device == "late" else contextlib.nullcontext()


def not_finite_before_an_abort(device: str, **options: Any) -> list[str]:
    """Error texts per step. In the third step, rank 0 raises after its last gradient.

    The gradients of that step are not finite, which the peers report.
    """
    module = layers(device)
    main = torch.accelerator.current_stream()
    streams = [torch.Stream(device=device) for _ in module.parameters()]
    nodes = [accumulate_on(p, s) for p, s in zip(module.parameters(), streams, strict=True)]
    ours = ReducerDDP(module, **options)
    ours.set_check_finite()
    texts = []
    for step in range(4):
        ours.zero_grad()
        x = batch(device, step)
        raises = step == 2 and dist.get_rank() == 0
        if raises:
            x[0, 0] = float("inf")
        x = x.requires_grad_() * 1  # the node runs after the accumulation of every gradient
        if raises:
            x.register_hook(fail)
        try:
            with slow_looks(device):
                backward(loss_of(ours, x))
            texts.append("")
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
        for stream in streams:
            main.wait_stream(stream)
            stream.wait_stream(main)
    assert len(nodes) == len(streams)
    return texts


def packed_at_an_abort(device: str, comes_late: bool = False, **options: Any) -> Pairs:
    """Rank 0 uses a layer that was predicted to be unused, and raises after its last gradient.

    Its peers finish the step with the gradient of rank 0, which was added to zeros on another
    stream. Returns the gradients of the peers in that step, and those of all ranks in the other
    steps.

    ``comes_late``: The abort is reported after rank 0 has caught the error. In any case the report
    leaves each gradient in its memory, since the script may use the gradient.
    """
    module = layers(device, 2)
    main = torch.accelerator.current_stream()
    streams = [torch.Stream(device=device) for _ in module.parameters()]
    nodes = [accumulate_on(p, s) for p, s in zip(module.parameters(), streams, strict=True)]
    unused = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **unused, **options)
    make_grads(module)
    pairs: Pairs = []

    def number_used(step: int, rank: int) -> int:
        return 2 if step == 3 and rank == 0 else 1

    for step in range(5):
        expected = [
            torch.zeros(16, 16) if grad is None else grad
            for grad in expected_of_used(module, number_used, step)
        ]
        ours.zero_grad(set_to_none=False)
        for stream in streams:
            stream.wait_stream(main)
        x = batch(device, step).requires_grad_() * 1  # the node runs after every gradient
        loss = loss_of(module[: number_used(step, dist.get_rank())], x)
        if number_used(step, dist.get_rank()) == 1:
            backward(loss)
            pairs += pair_up(module, expected)
            continue
        if comes_late:
            raise_before_the_abort(ours, loss, x)
        else:
            x.register_hook(fail)
            with contextlib.suppress(ValueError):
                backward(loss)
        places = [param.grad.data_ptr() for param in module.parameters()]
        while ours.reducer.phase != _C.Phase.FAILED:  # an engine thread ends the step
            time.sleep(0.001)
        assert places == [param.grad.data_ptr() for param in module.parameters()]
        for stream in streams:
            main.wait_stream(stream)
        make_grads(module)
    assert len(nodes) == len(streams)
    return pairs


@contextlib.contextmanager
def _raises_at(layer: torch.nn.Linear) -> Iterator[None]:
    """A backward in the block raises when it reaches the layer. The error is caught."""
    hook = layer.weight.register_hook(fail)
    try:
        with contextlib.suppress(ValueError):
            yield
    finally:
        hook.remove()


def raised_in_mid_backward(device: str, zeroes: bool = False, **options: Any) -> Pairs:
    """Backward raises on every rank. The next steps are correct.

    ``zeroes``: Rank 0 zeroes gradients in place, before all-reduces of the failed step end. The
    memory of the other ranks' buckets keeps its values.
    """
    module = layers(device)
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)
    pairs: Pairs = []
    for step in range(5):
        expected = expected_grads(module, loss_of, step)
        raises = step in (0, 3)
        hook = module[1].weight.register_hook(fail) if raises else None
        waits = zeroes and device == "late" and dist.get_rank() == 0
        with late_device.slow("allreduce", 60) if waits else contextlib.nullcontext():
            try:
                backward(loss_of(ours, batch(device, step)))
            except ValueError:
                assert raises
            else:
                assert not raises
                pairs += pair_up(module, expected)
            if hook is not None:
                hook.remove()
            ours.zero_grad(set_to_none=not zeroes or dist.get_rank() > 0)
            torch.accelerator.synchronize()
    return pairs


def repeats_a_backward(device: str, zeroes: bool = False, **options: Any) -> Pairs:
    """Backward raises on every rank, and runs again without a new forward."""
    module = layers(device)
    ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)
    pairs: Pairs = []
    for step in range(5):
        expected = expected_grads(module, loss_of, step)
        ours.zero_grad(set_to_none=not zeroes)
        loss = loss_of(ours, batch(device, step))
        if step in (0, 3):
            with _raises_at(module[1]):
                loss.backward(retain_graph=True)
            ours.zero_grad(set_to_none=not zeroes)
        backward(loss)
        pairs += pair_up(module, expected)
    return pairs


def raised_on_a_side_stream(device: str, **options: Any) -> Pairs:
    """The script trains on a side stream, which is busy. A backward raises at the last layer.

    Returns the gradients of this layer before the backward and after reset().
    """
    side = torch.Stream(device=device)
    pairs: Pairs = []
    with side:
        module = layers(device)
        ours = ReducerDDP(module, bucket_cap_mb=0.0001, **options)
        for step in range(5):
            ours.zero_grad()
            backward(loss_of(ours, batch(device, step)))
            before = [module[0].weight.grad.cpu()]
            loss = loss_of(ours, batch(device, step))
            keep_busy(device, 60)
            with _raises_at(module[0]):
                loss.backward()
            ours.reset()
            pairs += pair_up(module[:1], before)
    return pairs


def cleared_while_aborts_are_reported(device: str, **options: Any) -> int:
    """In each of many steps backward raises, and the script clears the gradients at once.

    Returns the number of steps that have ended.
    """
    # Ranks that share a GPU take some 50 ms for each of the four all-reduces of a step.
    num_steps = 100 if device == "late" else 25
    torch.manual_seed(1)
    module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(150))).to(device)
    ours = ReducerDDP(module, bucket_cap_mb=0.01, **options)
    x = torch.randn(4, 8).to(device)
    for _ in range(3):
        ours(x).sum().backward()
    for _ in range(num_steps):
        loss = ours(x).sum()
        with _raises_at(module[0]):
            loss.backward()
        for param in module.parameters():
            param.grad = None
    torch.accelerator.synchronize()  # the next test must not wait for all-reduces that are queued
    return ours.reducer.num_steps
