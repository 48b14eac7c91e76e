"""Averages by weight on a device. The functions run on every rank, on "late", "cuda" or "cpu"."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from abort_cases import fail
from capture_cases import captured
from device_models import accumulate_on, backward, batch, layers
from device_ranks import controls
from graph_cases import deterministic
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from usage_cases import _OnTwoDevices as OnTwoDevices

import ddpx
from ddpx import ReducerDDP

State = list[torch.Tensor]
WARM_UP_STEPS = 4  # the buckets do not change after 3 steps


def _loss_sum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def _weight(step: int, rank: int) -> int:
    return (3 * step + 5 * rank) % 4 + (rank == 0)


def _train(
    model: ReducerDDP, device: str, tensors: bool, num_steps: int = 4, micro_steps: int = 2
) -> State:
    """Gradients of all steps. ``tensors``: weights are on the device."""
    found = []
    for step in range(num_steps):
        model.zero_grad()
        for micro_step in range(micro_steps):
            number = micro_steps * step + micro_step
            local = micro_step < micro_steps - 1
            with model.no_sync() if local else nullcontext():
                weight = _weight(number, dist.get_rank())
                ddpx.set_weight(model, torch.tensor(weight, device=device) if tensors else weight)
                loss = _loss_sum(model, batch(device, number))
                loss.backward() if local else backward(loss)
        found += [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
    return found


def weighted(device: str, tensors: bool, average: str = "weights", **options: Any) -> State:
    model = ReducerDDP(layers(device), bucket_cap_mb=0.0015, average=average, **options)
    if average == "weights":
        return _train(model, device, tensors)
    found = []
    for step in range(4):
        model.zero_grad()
        backward(_loss_sum(model, batch(device, step)))
        found += [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
    return found


def weighted_with_a_hook(device: str, **options: Any) -> State:
    model = ReducerDDP(layers(device), bucket_cap_mb=0.0015, average="weights", **options)
    model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    return _train(model, device, tensors=True)


def weighted_on_two_devices(device: str, **options: Any) -> State:
    model = ReducerDDP(OnTwoDevices(device), average="weights", **options)
    return _train(model, device, tensors=True)


def weighted_in_half(device: str, tensors: bool, **options: Any) -> State:
    """The sum of weights is beyond the range of float16."""
    module = nn.Linear(1, 1, bias=False).half().to(device)
    nn.init.ones_(module.weight)
    model = ReducerDDP(module, average="weights", **options)
    found = []
    for _ in range(2):
        model.zero_grad()
        ddpx.set_weight(model, torch.tensor(100_003, device=device) if tensors else 100_003)
        backward(model(torch.full((1, 1), 20_000.0, dtype=torch.float16, device=device)).sum())
        assert module.weight.grad is not None
        found.append(module.weight.grad.cpu().clone())
    return found


def weighted_uneven(device: str, **options: Any) -> State:
    model = ReducerDDP(layers(device), average="weights", **options)
    with model.join():
        return _train(model, device, tensors=True, num_steps=3 + dist.get_rank(), micro_steps=1)


def weighted_on_side_streams(device: str, **options: Any) -> State:
    """Each weight is computed late, on a stream of its own."""
    model = ReducerDDP(layers(device), bucket_cap_mb=0.0015, average="weights", **options)
    found = []
    for step in range(4):
        model.zero_grad()
        stream = None if device == "cpu" else torch.Stream(device=device)
        with stream or nullcontext():
            weight = torch.full((), 2.0 + step + dist.get_rank(), device=device)
            for _ in range(20):
                weight = weight * 2 - weight
            ddpx.set_weight(model, weight)
        backward(_loss_sum(model, batch(device, step)))
        found += [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
    return found


def lost_with_gradients_of_other_streams(device: str, **options: Any) -> None:
    """A backward that raises adds to gradients of zero, each on a stream of its own.

    The next backward raises, since these gradients have no weight.
    """
    module = layers(device)
    streams = [torch.Stream(device=device) for _ in module.parameters() if device != "cpu"]
    nodes = [accumulate_on(p, s) for p, s in zip(module.parameters(), streams, strict=False)]
    model = ReducerDDP(module, average="weights", **options)
    with model.no_sync():
        ddpx.set_weight(model, 1)
        backward(0 * _loss_sum(model, batch(device, 0)))
    ddpx.set_weight(model, 1)
    loss = _loss_sum(model, batch(device, 1))
    hook = next(module.parameters()).register_hook(fail)  # the last gradient
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    hook.remove()
    ddpx.set_weight(model, 1)
    loss = _loss_sum(model, batch(device, 2))
    with pytest.raises(RuntimeError, match="weights of earlier forwards are forgotten"):
        backward(loss)
    assert len(nodes) == len(streams)


def no_synchronisation(device: str, **options: Any) -> None:
    """The host waits for no sum of weights, if the device has done the step before."""
    model = ReducerDDP(layers(device, 8), average="weights", **options)
    x, weight = batch(device, 0), torch.tensor(3.0, device=device)

    def step() -> None:
        model.zero_grad()
        ddpx.set_weight(model, weight)
        _loss_sum(model, x).backward()

    for _ in range(3):  # agreeing on buckets may synchronize
        step()
    torch.accelerator.synchronize()
    if device == "late":
        for _ in range(5):
            controls().reset_counts()
            step()
            assert controls().num_synchronisations() == 0
            assert controls().counts(0)["fallback"] == {}
            torch.accelerator.synchronize()
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def bad_weights(device: str, weights: list[float], finite_check: bool, pauses: bool = True) -> None:
    """The next step raises on all ranks. Before, gradients are NaN."""
    module = layers(device)
    model = ReducerDDP(module, average="weights")
    rank = dist.get_rank()

    def step(weight: torch.Tensor) -> None:
        model.zero_grad()
        ddpx.set_weight(model, weight)
        loss = _loss_sum(model, x)
        backward(loss) if pauses else loss.backward()

    # Copies to the device make the host wait, and come first.
    x, right = batch(device, 0), torch.tensor(1.0, device=device)
    wrong = torch.tensor(weights[rank], device=device)
    step(right)
    if finite_check:
        model.set_check_finite(True)
    own = "of this rank" if not weights[rank] >= 0 else "of another rank"
    text = "sum to 0" if not any(weights) else f"a weight {own} is negative, infinite or NaN"
    if finite_check:
        with pytest.raises(RuntimeError, match=f"step 1.*{text}"):
            step(wrong)
    else:
        step(wrong)
    for param in module.parameters() if pauses else ():
        assert param.grad is not None and param.grad.isnan().all()
    if not finite_check:
        with pytest.raises(RuntimeError, match=f"step 1.*{text}"):
            step(right)
    step(right)
    for param in module.parameters():
        assert param.grad is not None and param.grad.isfinite().all()


class _Training:
    """Steps with static inputs and weights, which a graph can repeat."""

    def __init__(self, device: str, hook: bool = False, **options: Any) -> None:
        self.device = device
        self.module = layers(device)
        self.model = ReducerDDP(self.module, bucket_cap_mb=0.0015, average="weights", **options)
        if hook:
            self.model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
        self.x = [batch(device, 0) for _ in range(2)]
        self.weights = [torch.zeros((), device=device) for _ in range(2)]
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)

    def load(self, number: int, scale: float = 1.0) -> None:
        for part in range(2):
            self.x[part].copy_(batch("cpu", 2 * number + part))
            self.weights[part].fill_(scale * _weight(2 * number + part, dist.get_rank()))

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.model.no_sync():
            ddpx.set_weight(self.model, self.weights[0])
            _loss_sum(self.model, self.x[0]).backward()
        ddpx.set_weight(self.model, self.weights[1])
        _loss_sum(self.model, self.x[1]).backward()
        self.optimizer.step()

    def capture(self, stream: torch.Stream) -> Any:
        if self.device == "late":

            def again() -> None:
                with captured("late", stream):
                    self.step()

            return again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step()
        return graph.replay


def in_a_graph(device: str, **options: Any) -> tuple[State, State]:
    """The parameters after eager steps, and after steps of a graph."""
    results = []
    with deterministic(device):
        for graphs in (False, True):
            stream = torch.Stream(device=device)
            with stream:
                training = _Training(device, **options)
                run = training.step
                for number in range(WARM_UP_STEPS + 4):
                    training.load(number)
                    if graphs and number == WARM_UP_STEPS:
                        run = training.capture(stream)
                    run()
                torch.accelerator.synchronize()
                results.append([p.detach().cpu() for p in training.module.parameters()])
    return results[0], results[1]


def zero_in_a_graph(device: str) -> None:
    """The gradients become NaN. The check for finite gradients reports the parameters."""
    stream = torch.Stream(device=device)
    with stream:
        training = _Training(device)
        for number in range(WARM_UP_STEPS):
            training.load(number)
            training.step()
        replay = training.capture(stream)
        training.load(WARM_UP_STEPS, scale=0.0)
        replay()
        torch.accelerator.synchronize()
        for param in training.module.parameters():
            assert param.grad is not None and param.grad.isnan().all()
        training.model.set_check_finite(True)
        training.load(WARM_UP_STEPS + 1)
        with pytest.raises(RuntimeError, match="gradients contain NaN or infinity"):
            training.step()


def number_in_a_graph(device: str) -> None:
    """A graph would repeat the number."""
    stream = torch.Stream(device=device)
    with stream:
        model = ReducerDDP(layers(device), average="weights")
        x = batch(device, 0)
        for _ in range(WARM_UP_STEPS):
            model.zero_grad()
            ddpx.set_weight(model, 3)
            _loss_sum(model, x).backward()
        model.zero_grad()
        refused = pytest.raises(RuntimeError, match="a weight of this step is a number")
        with refused, captured(device, stream):
            ddpx.set_weight(model, 3)
            _loss_sum(model, x).backward()
