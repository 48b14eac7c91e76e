"""Parameters without a gradient in a step, on all ranks or on some."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import compare_with_ddp

# The branches that rank 0, rank 1, and so on use, per step. With more ranks the list repeats.
Pattern = tuple[tuple[str, ...], ...]
BRANCHES = "abc"
PATTERNS: dict[str, Pattern] = {
    "never": (("ab",),) * 4,
    "from the second step on": (("abc",), ("ab",), ("ab",), ("ab",)),
    "until the second step": (("ab",), ("abc",), ("abc",), ("abc",)),
    "used, unused, used again": (("abc",), ("abc",), ("bc",), ("abc",), ("abc",)),
    "alternating": (("ab",), ("bc",), ("ab",), ("bc",), ("ab",)),
    "not on rank 0": (("ab", "abc", "abc"),) * 4,
    "only on rank 0": (("abc", "ab", "ab"),) * 4,
    "not on rank 0, then not on rank 1": (
        ("ac", "abc"),
        ("ac", "abc"),
        ("abc", "ac"),
        ("ac", "ac"),
    ),
    "different on each rank": (("a", "b", "c"),) * 3,
    "different on each rank and step": (("a", "bc", "ac"), ("b", "", "c"), ("c", "ac", "b")) * 2,
    "nothing but the trunk": (("abc",), ("",), ("abc",), ("", "abc"), ("",), ("",)),
    "random": tuple(
        tuple("".join(b for b in BRANCHES if source.random() < 0.7) for _ in range(3))
        for source in [random.Random(3)]
        for _ in range(10)
    ),
}
patterns = pytest.mark.parametrize("pattern", PATTERNS)


class Branches(nn.Module):
    """A trunk and branches. Each forward uses the selected branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.branches = nn.ModuleDict({name: nn.Linear(6, 6) for name in BRANCHES})
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, used: str, output_type: str = "tensor") -> Any:
        hidden = torch.tanh(self.first(x))
        for name in used:
            hidden = hidden + torch.tanh(self.branches[name](hidden))
        return OUTPUT_TYPES[output_type](self, self.last(hidden))


class Custom:
    """A type that does not reveal its tensors."""

    __slots__ = ("hidden",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.hidden = tensor


@dataclasses.dataclass
class Record:
    loss: torch.Tensor
    name: str = "record"


def _keep(model: nn.Module, tensor: torch.Tensor) -> None:
    model.kept = tensor


OUTPUT_TYPES = {
    "tensor": lambda model, tensor: tensor,
    "dict": lambda model, tensor: {"out": [tensor], "nothing": None},
    "dataclass": lambda model, tensor: Record(tensor),
    "custom": lambda model, tensor: Custom(tensor),
    "function": lambda model, tensor: lambda: tensor,
    "None": _keep,
}


def _tensor_of(output: Any, model: nn.Module) -> torch.Tensor:
    if output is None:
        return model.module.kept
    if isinstance(output, dict):
        return output["out"][0]
    if isinstance(output, Record):
        return output.loss
    if isinstance(output, Custom):
        return output.hidden
    return output if isinstance(output, torch.Tensor) else output()


def _used(pattern: str, number: int) -> str:
    step = PATTERNS[pattern][number]
    return step[dist.get_rank() % len(step)]


def _names(branches: str) -> set[str]:
    return {f"branches.{name}.{kind}" for name in branches for kind in ("weight", "bias")}


def _step(model: nn.Module, used: str, output_type: str = "tensor") -> None:
    output = model(ref.data(), used, output_type)
    ref.backward(model, ref.loss_of(_tensor_of(output, model)))


def _check_default(pattern: str, mode: str) -> None:
    """On ranks that did not use a parameter, the same backward names it. It names no other."""
    ours, slow = ref.make_pair(Branches, mode)
    for number in range(len(PATTERNS[pattern])):
        used = _used(pattern, number)
        missing = _names(BRANCHES) - _names(used)
        ref.zero_grads("none", ours, slow)
        ref.seed(number)
        _step(slow, used)
        ref.seed(number)
        text = ref.error_of(_step, ours, used)
        if missing:
            ref.assert_names(text, missing, "find_unused_parameters=True")
            assert not [name for name in _names(used) if f"'{name}'" in text]
        else:
            assert not text, text
        ref.assert_same(ours, slow, missing)
    ref.check_steps(ours, slow, lambda model, _: _step(model, BRANCHES))


@pytest.mark.parametrize("mode", ["default", "view"])
@patterns
def test_named_by_default(ranks, pattern, mode, world):
    ref.on_ranks(ranks, world, _check_default, pattern, mode)


def _check_static(pattern: str, mode: str) -> None:
    """Parameters without use in the first step are ignored. Later differences are named."""
    ours, slow = ref.make_pair(Branches, mode)
    first = _used(pattern, 0)
    for number in range(len(PATTERNS[pattern])):
        used = _used(pattern, number)
        ref.zero_grads("none", ours, slow)
        ref.seed(number)
        _step(slow, used)
        ref.seed(number)
        text = ref.error_of(_step, ours, used)
        missing, extra = _names(first) - _names(used), _names(used) - _names(first)
        if extra and text:
            assert "static_graph" in text, text
            assert [name for name in missing | extra if f"'{name}'" in text], text
        elif missing or text:
            ref.assert_names(text, missing, "static_graph")
        unspecified = missing | (extra if text else set())
        # If a peer has reported other use of a parameter, its mean is not specified.
        unspecified = {
            name for name in sorted(_names(BRANCHES)) if ref.anywhere(name in unspecified)
        }
        ref.assert_same(ours, slow, unspecified)
    ref.check_steps(ours, slow, lambda model, _: _step(model, _used(pattern, 0)))


@pytest.mark.parametrize("mode", ["static", "static-view"])
@patterns
def test_named_in_a_static_graph(ranks, pattern, mode, world):
    ref.on_ranks(ranks, world, _check_static, pattern, mode)


def _check_find_unused(pattern: str, mode: str) -> None:
    """No error. Ranks without use count as zeros.

    Without use on any rank, ``grad`` stays unchanged.
    """
    for zero_style in ref.ZERO_STYLES:
        ours, slow = ref.make_pair(Branches, mode)
        ref.check_steps(
            ours,
            slow,
            lambda model, number: _step(model, _used(pattern, number)),
            len(PATTERNS[pattern]),
            zero_style,
        )


@pytest.mark.parametrize("mode", ["unused", "unused-view"])
@patterns
def test_find_unused(ranks, pattern, mode, world):
    ref.on_ranks(ranks, world, _check_find_unused, pattern, mode)


def _accumulate(model: ref.SlowDDP | ReducerDDP, pattern: str, number: int) -> None:
    """One micro-batch with the branches of the last step, one with those of this step."""
    with model.no_sync():
        _step(model, _used(pattern, number - 1))
    _step(model, _used(pattern, number))


def _check_accumulation(pattern: str, mode: str) -> None:
    for zero_style in ("none", "keep"):
        ours, slow = ref.make_pair(Branches, mode)
        num_steps = len(PATTERNS[pattern])
        ref.check_steps(ours, slow, lambda m, n: _accumulate(m, pattern, n), num_steps, zero_style)


@pytest.mark.parametrize("mode", ["unused", "unused-view"])
@patterns
def test_find_unused_with_accumulation(ranks, pattern, mode, world):
    ref.on_ranks(ranks, world, _check_accumulation, pattern, mode)


def _check_output_type(output_type: str, mode: str) -> None:
    patterns = ["never", "different on each rank and step"]
    for pattern in patterns if "unused" in mode else [None]:
        ours, slow = ref.make_pair(Branches, mode)

        def step(model: nn.Module, number: int, pattern: str | None = pattern) -> None:
            _step(model, BRANCHES if pattern is None else _used(pattern, number), output_type)

        ref.check_steps(ours, slow, step)


@pytest.mark.parametrize("mode", ref.MODES)
@pytest.mark.parametrize("output_type", OUTPUT_TYPES)
def test_output_types(ranks, output_type, mode, world):
    """The type of the output makes no difference, since ddpx does not search it for graphs."""
    ref.on_ranks(ranks, world, _check_output_type, output_type, mode)


def _check_against_ddp(pattern: str, mode: str, accumulate: bool) -> None:
    def step(model: nn.Module, number: int) -> None:
        if accumulate:
            with model.no_sync():
                _step(model, _used(pattern, number - 1))
        _step(model, _used(pattern, number))

    for cap, set_to_none in ((ref.SMALL_CAP, True), (ref.SMALL_CAP, None), (25.0, False)):
        compare_with_ddp(
            lambda: ref.build_same(Branches),
            step,
            num_steps=len(PATTERNS[pattern]),
            set_to_none=set_to_none,
            bucket_cap_mb=cap,
            **ref.MODES[mode],
        ).raise_if_different()


@pytest.mark.parametrize("accumulate", [False, True], ids=["one backward", "no_sync before"])
@pytest.mark.parametrize("mode", ["unused", "unused-view"])
@patterns
def test_same_bits_as_ddp(ranks, pattern, mode, accumulate, world):
    """Parameters that this rank does not use have no effect on the bits of the results."""
    ref.on_ranks(ranks, world, _check_against_ddp, pattern, mode, accumulate)


class BesideTheModel(Branches):
    """The second output reaches no parameter, but has a graph."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, BRANCHES), x * 2


def _backward_beside(model: nn.Module, kept: list[torch.Tensor] | None = None) -> None:
    """Rank 1's loss reaches no parameter. ``kept`` keeps the output that does."""
    output, beside = model(ref.data().requires_grad_())
    if kept is not None:
        kept.append(output)
    loss = beside.sum() if dist.get_rank() == 1 else ref.loss_of(output)
    del output, beside
    ref.backward(model, loss)


def _everything(model: nn.Module, number: int) -> None:
    ref.backward(model, ref.loss_of(model(ref.data())[0]))


def _check_beside(mode: str, when: int) -> None:
    """The peers of rank 1 get their means, and no rank waits."""
    ours, slow = ref.make_pair(BesideTheModel, mode)
    ref.check_steps(ours, slow, _everything, when)
    names = {name for name, _ in ours.module.named_parameters()}
    static = "static" in mode
    for number in (7, 8):
        ref.zero_grads("none", ours, slow)
        ref.seed(number)
        _backward_beside(slow)
        ref.seed(number)
        text = ref.error_of(_backward_beside, ours)
        if dist.get_rank() != 1 or "unused" in mode:
            assert not text, text
        elif when or not static:
            ref.assert_names(text, names)
        ref.assert_same(ours, slow, names if text else ())
    if when or not static:
        ref.check_steps(ours, slow, _everything)
    ref.assert_in_step()


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("mode", ref.MODES)
def test_loss_that_reaches_no_parameter(ranks, mode, when, world):
    ref.on_ranks(ranks, world, _check_beside, mode, when)


def _check_beside_kept(mode: str) -> None:
    """While the other output exists, the error may be delayed until the next forward."""
    ours, slow = ref.make_pair(BesideTheModel, mode)
    names = {name for name, _ in ours.module.named_parameters()}
    kept: list[torch.Tensor] = []
    ref.seed(0)
    _backward_beside(slow)
    ref.seed(0)
    text = ref.error_of(_backward_beside, ours, kept)
    ref.assert_same(ours, slow, names if dist.get_rank() == 1 else ())
    if dist.get_rank() == 1:
        ref.assert_names(text or ref.error_of(ours, ref.data()), names)
    else:
        assert not text, text
    ref.assert_in_step()


@pytest.mark.parametrize("mode", ["default", "view"])
def test_loss_that_reaches_no_parameter_beside_a_live_output(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_beside_kept, mode)


def _check_skipped_buckets() -> None:
    """A bucket whose parameters no rank uses is left out after some steps."""
    layers = nn.ModuleList([nn.Linear(300, 300) for _ in range(2)])
    for skips in (False, True):
        model = ReducerDDP(
            copy.deepcopy(layers),
            find_unused_parameters=True,
            skip_all_reduce_unused_params=skips,
            bucket_cap_mb=0.1,
        )
        model.module.forward = model.module[1].forward
        for _ in range(8):
            model(torch.ones(1, 300)).sum().backward()
        num_buckets = len(model.reducer.plan.buckets)
        num_launches = model._get_ddp_logging_data()["num_buckets_reduced"]
        assert (num_launches < num_buckets) == skips, (num_launches, num_buckets)


def test_buckets_of_unused_parameters_may_be_skipped(ranks):
    ranks(2).run(_check_skipped_buckets)


def _clear(param: torch.Tensor) -> None:
    param.grad = None


def _check_cleared() -> None:
    """A gradient that a hook clears on all ranks counts as unused."""
    model = ReducerDDP(ref.build_same(Branches), find_unused_parameters=True)
    cleared = model.module.branches["a"].weight
    cleared.register_post_accumulate_grad_hook(_clear)
    for _ in range(3):
        model.zero_grad()
        _step(model, "ab")
        assert cleared.grad is None
        assert model.module.branches["b"].weight.grad is not None


def test_a_gradient_that_a_hook_clears(ranks):
    ref.on_ranks(ranks, 2, _check_cleared)
