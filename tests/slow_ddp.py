"""The slow and simple reference: averages the gradients of a bare module after backward.

A usage is a function of a model. The same function runs with ``SlowDDP`` and ``ReducerDDP``.
Everything is in double precision, so that the tolerance only has to cover the order of sums.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP

Build = Callable[[], nn.Module]
Step = Callable[[nn.Module, int], None]

MODES: dict[str, dict[str, bool]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static-view": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused-view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
# Small, so that even the small models here have several buckets.
SMALL_CAP = 0.0005
ZERO_STYLES = ("none", "zeros", "keep")

modes = pytest.mark.parametrize("mode", MODES)

# Collections within a test then skip the objects that torch created at import. Otherwise each
# collection takes half a second.
gc.freeze()


def on_ranks(ranks: Any, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs ``function`` on every rank, under a time limit."""
    return ranks(world).run(function, *args, timeout=30.0)


class SlowDDP(nn.Module):
    """Averages ``grad`` of each parameter over all ranks at the end of backward.

    A missing gradient counts as zeros. ``grad`` stays unchanged if no rank has used the parameter
    since the last averaging, or, unless ``find_unused_parameters`` is set, if the parameter is
    frozen.
    """

    def __init__(self, module: nn.Module, find_unused_parameters: bool = False) -> None:
        super().__init__()
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.managed = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.used: set[str] = set()
        for name, param in self.managed.items():
            param.register_post_accumulate_grad_hook(lambda _, name=name: self.used.add(name))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def average(self) -> None:
        totals = []
        for name, param in self.managed.items():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            used = grad.new_tensor([float(name in self.used)])
            totals.append(torch.cat([grad.detach().reshape(-1), used]))
        self.used.clear()
        for param, total in zip(self.managed.values(), self.all_reduce(totals), strict=True):
            if total[-1] > 0 and (param.requires_grad or self.find_unused_parameters):
                param.grad = (total[:-1] / dist.get_world_size()).view_as(param)

    @staticmethod
    def all_reduce(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Sums tensors over all ranks, in one call to save time."""
        together = torch.cat(list(tensors))
        dist.all_reduce(together)
        return together.split([tensor.numel() for tensor in tensors])


def backward(model: nn.Module, loss: torch.Tensor, **kwargs: Any) -> None:
    """``loss.backward(**kwargs)`` with either wrapper."""
    loss.backward(**kwargs)
    if isinstance(model, SlowDDP) and model.require_backward_grad_sync:
        model.average()


def bare(model: nn.Module) -> nn.Module:
    """The module inside the wrapper, or inside several wrappers."""
    while isinstance(model, (SlowDDP, ReducerDDP)):
        model = model.module
    return model


def seed(number: int) -> None:
    """Seeds the random generators by step and rank. All models of a step get the same numbers."""
    torch.manual_seed(7919 * (number + 1) + dist.get_rank())


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 6)), dtype=torch.float64)


def build_same(build: Build) -> nn.Module:
    """The module in double precision, with the same weights on every rank."""
    torch.manual_seed(0)
    return build().double()


def make_pair(build: Build, mode: str, cap: float = SMALL_CAP) -> tuple[ReducerDDP, SlowDDP]:
    module = build_same(build)
    finds_unused = MODES[mode].get("find_unused_parameters", False)
    slow = SlowDDP(copy.deepcopy(module), finds_unused)
    return ReducerDDP(module, bucket_cap_mb=cap, **MODES[mode]), slow


def zero_grads(style: str, *models: nn.Module) -> None:
    for model in models:
        if style != "keep":
            model.zero_grad(set_to_none=style == "none")


def differences(ours: nn.Module, slow: nn.Module, unspecified: Collection[str] = ()) -> list[str]:
    """One sentence for each gradient of ``ours`` that differs from that of ``slow``."""
    found = []
    pairs = zip(bare(ours).named_parameters(), bare(slow).parameters(), strict=True)
    for (name, param), expected in pairs:
        if name in unspecified:
            continue
        left, right = param.grad, expected.grad
        if left is None or right is None:
            if left is not right:
                found.append(f"{name}: {_text(left)}, expected {_text(right)}")
        elif not torch.allclose(left, right, rtol=1e-9, atol=1e-12):
            found.append(f"{name}: {_text(left)}, expected {_text(right)}")
    return found


def _text(grad: torch.Tensor | None) -> str:
    return "None" if grad is None else f"sum {grad.sum().item():.6g}"


def assert_same(ours: nn.Module, slow: nn.Module, unspecified: Collection[str] = ()) -> None:
    found = differences(ours, slow, unspecified)
    assert not found, f"rank {dist.get_rank()}: " + "; ".join(found)


def run_both(ours: nn.Module, slow: nn.Module, step: Step, number: int) -> None:
    """Runs one step with both wrappers.

    The reference runs first, so that an error of ours leaves the ranks in step.
    """
    for model in (slow, ours):
        seed(number)
        step(model, number)


def check_steps(
    ours: nn.Module,
    slow: nn.Module,
    step: Step,
    num_steps: int = 3,
    zero_style: str = "none",
    first: int = 0,
) -> None:
    """Checks after each step that all gradients are the mean over ranks."""
    for number in range(first, first + num_steps):
        zero_grads(zero_style, ours, slow)
        run_both(ours, slow, step, number)
        assert_same(ours, slow)
    assert_in_step()


def assert_in_step() -> None:
    """Checks that the next collective call matches on all ranks, so that no call is left over."""
    total = torch.full((5,), 1.0 + dist.get_rank())
    dist.all_reduce(total)
    world = dist.get_world_size()
    assert torch.equal(total, torch.full((5,), world * (world + 1) / 2))


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the RuntimeError that the call raises, or an empty string."""
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return ""


def says(text: str, name: str) -> bool:
    """Whether the text contains the name as a whole, and not only as a part of another name."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\.?\w)", text) is not None


def assert_names(text: str, names: Collection[str], *remedy: str) -> None:
    """Checks that the error contains ``words`` and the parameter names.

    A long list may be cut, with the number of further names.
    """
    missing = [name for name in names if not says(text, name)]
    more = re.search(r"' and (\d+) more", text)
    if more and len(missing) < len(names):
        missing = missing[int(more[1]) :]
    missing += [word for word in remedy if word not in text]
    assert not missing, f"{missing} not in {text!r}"


def anywhere(flag: bool) -> bool:
    """Whether ``flag`` is true on at least one rank."""
    total = torch.tensor([int(flag)])
    dist.all_reduce(total)
    return bool(total.item())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.sum()


def plain_step(model: nn.Module, number: int) -> None:
    backward(model, loss_of(model(data())))
