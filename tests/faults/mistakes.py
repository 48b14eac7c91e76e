"""Mistakes: what the last rank does differently from the others, and the reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fault_ranks import announce, await_announcement, let_meet, mark, text_of
from torch import nn

from ddpx import ReducerDDP

Wrap = Callable[..., nn.Module]


@dataclass(frozen=True)
class Outcome:
    """The result on one rank: its error text, empty if none, and the time by time.monotonic()."""

    kind: str
    text: str
    at_s: float


def _odd() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


class _Buffered(nn.Linear):
    def __init__(self, buffer_size: int) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(buffer_size))


def _strided() -> nn.Module:
    layout = torch.channels_last if _odd() else torch.contiguous_format
    return nn.Conv2d(3, 4, 3).to(memory_format=layout)


def _partly_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(not _odd())
    return module


CONSTRUCTION: dict[str, Callable[[Wrap], Any]] = {
    "has one parameter more": lambda wrap: wrap(nn.Linear(4, 4, bias=_odd())),
    "has a parameter of another shape": lambda wrap: wrap(nn.Linear(4, 4 + _odd())),
    "has parameters of another dtype": lambda wrap: wrap(
        nn.Linear(4, 4, dtype=torch.float64 if _odd() else torch.float32)
    ),
    "names its parameters otherwise": lambda wrap: wrap(
        nn.ModuleDict({"other" if _odd() else "layer": nn.Linear(4, 4)})
    ),
    "has a parameter of other strides": lambda wrap: wrap(_strided()),
    "has frozen a layer": lambda wrap: wrap(_partly_frozen()),
    "has a buffer of another shape": lambda wrap: wrap(_Buffered(4 + _odd())),
    "is given another option": lambda wrap: wrap(nn.Linear(4, 4), find_unused_parameters=_odd()),
}


def swap_backwards(wrap: Wrap, num_steps: int = 1, pause_s: float = 0.0) -> None:
    """Swaps the backwards of two models of the same sizes."""
    models = [wrap(nn.Linear(32, 32)) for _ in range(2)]
    let_meet(models[0])
    mark("fault")
    x = torch.full((2, 32), float(dist.get_rank() + 1))
    for _ in range(num_steps):
        for model in models[::-1] if _odd() else models:
            model(x).pow(2).sum().backward()
        time.sleep(pause_s)


def call_once_more(
    wrap: Wrap,
    place: str,
    num_elements: int,
    in_step: int = 1,
    num_steps: int = 6,
    pause_s: float = 0.0,
) -> None:
    """An all-reduce of the rank's own in one of the steps.

    After the first step, ranks lay out buckets.
    """
    module = nn.Linear(32, 32)
    model = wrap(module)
    step = 0

    def come_to(here: str) -> None:
        if _odd() and step == in_step and here == place:
            dist.all_reduce(torch.zeros(num_elements))

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        come_to("communication hook")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())

    module.register_forward_pre_hook(lambda *_: come_to("forward"))
    module.weight.register_hook(lambda _: come_to("gradient hook"))
    if place == "communication hook":
        model.register_comm_hook(None, hook)  # type: ignore[operator]
    let_meet(model)
    mark("fault")
    for number in range(num_steps):
        step = number
        model(torch.ones(2, 32)).sum().backward()
        come_to("between steps")
        time.sleep(pause_s)


def freeze_a_layer(
    wrap: Wrap, options: dict[str, Any], in_step: int = 1, num_steps: int = 4, pause_s: float = 0.0
) -> None:
    """Freezes a layer from one of the steps on."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = wrap(module, **options)
    let_meet(model)
    mark("fault")
    for number in range(num_steps):
        if number == in_step:
            module[1].requires_grad_(not _odd())
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(pause_s)


def use_own_layers(wrap: Wrap, options: dict[str, Any], alone: bool, in_step: int) -> None:
    """Leaves out a layer from one step on: another one on each rank, or only on the last one."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(dist.get_world_size() + 1))
    model = wrap(Chosen(layers), **options)
    let_meet(model)
    mark("fault")
    for number in range(8):
        leaves_out = number >= in_step and (_odd() or not alone)
        used = set(range(len(layers))) - ({dist.get_rank()} if leaves_out else set())
        model(torch.ones(2, 4), used).sum().backward()


class Chosen(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, used: set[int]) -> torch.Tensor:
        for index in sorted(used):
            x = self.layers[index](x)
        return x


def _not_finite(wrap: Wrap) -> None:
    model = wrap(nn.Linear(4, 4))
    if isinstance(model, ReducerDDP):
        model.set_check_finite()
    mark("fault")
    model(torch.full((2, 4), float("inf") if _odd() else 1.0)).sum().backward()


TRAINING: dict[str, Callable[[Wrap], Any]] = {
    "runs two backwards the other way round": swap_backwards,
    # Hosts compare a part of all steps, twice a second.
    "runs two backwards the other way round, on another host": lambda wrap: swap_backwards(
        wrap, num_steps=200, pause_s=0.02
    ),
    "calls an all-reduce of its own in forward": lambda wrap: call_once_more(wrap, "forward", 3),
    "calls an all-reduce of its own between steps": lambda wrap: call_once_more(
        wrap, "between steps", 3
    ),
    "calls an all-reduce of its own behind the first step": lambda wrap: call_once_more(
        wrap, "between steps", 3, in_step=0
    ),
    "has a gradient that is not finite (`set_check_finite()`)": _not_finite,
}


MISTAKES = {**CONSTRUCTION, **TRAINING}


def outcome_of(action: Callable[..., Any], *args: Any) -> Outcome:
    kind = text = ""
    try:
        action(*args)
    except Exception as error:
        kind, text = type(error).__name__, text_of(error)
    return Outcome(kind, text, time.monotonic())


def outcome_when_all_end(train: Callable[[], None]) -> Outcome:
    """As :func:`outcome_of`. Returns when all ranks have ended their trainings."""
    outcome = outcome_of(train)
    announce(f"done {dist.get_rank()}")
    for rank in range(dist.get_world_size()):
        await_announcement(f"done {rank}")
    return outcome


def outcome_unless_odd(action: Callable[..., Any], *args: Any) -> Outcome | None:
    """As :func:`outcome_of`. An exception ends the process of the last rank, as in a script."""
    if _odd():
        action(*args)
        return None
    return outcome_of(action, *args)


def make_mistake(name: str, wrap: Wrap) -> Outcome:
    if name in CONSTRUCTION:
        mark("fault")
    return outcome_of(MISTAKES[name], wrap)
