"""A layer that is used several times, under both kinds of checkpoints, from the first step on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpx import ReducerDDP


class Chain(nn.Module):
    """Runs the layers that a program names, such as ``"A r(L) B r(LC)"``.

    ``r(..)`` is a reentrant checkpoint over layers, ``n(..)`` a non-reentrant one.
    """

    def __init__(self, layers: str = "ABCL", width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({letter: nn.Linear(width, width) for letter in layers})

    def forward(self, x: torch.Tensor, program: str) -> torch.Tensor:
        for part in program.split():
            kind, letters = re.fullmatch(r"(?:([rn])\()?(\w+)\)?", part).groups()
            if kind is None:
                x = self._run(x, letters)
            else:
                x = checkpoint(self._run, x, letters, use_reentrant=kind == "r")
        return x

    def _run(self, x: torch.Tensor, letters: str) -> torch.Tensor:
        for letter in letters:
            x = torch.tanh(self.layers[letter](x))
        return x


def _layers_of(program: str) -> str:
    return "".join(sorted({letter for letter in program if letter.isupper()}))


def _chain_step(program: str, model: nn.Module) -> None:
    ref.backward(model, ref.loss_of(model(ref.data().requires_grad_(), program)))


PROGRAMS = (
    "r(L) r(L)",
    "r(L) r(L) r(L)",
    "A r(L) r(L)",
    "r(L) B r(L)",
    "r(L) r(L) C",
    "A r(L) B r(L) C",
    "A r(LB) r(CL)",
    "r(A) r(L) r(B) r(L) r(C)",
    "L r(L)",
    "r(L) L",
    "A L B r(L) C",
    "A r(L) B L C",
    "r(L) L r(L)",
    "r(LL) r(L)",
    "n(L) r(L)",
    "A r(L) B n(L) C",
    "n(L) A n(L)",
)


def _check_program(program: str, mode: str) -> None:
    ours, slow = ref.make_pair(lambda: Chain(_layers_of(program)), mode)
    ref.check_steps(ours, slow, lambda model, _: _chain_step(program, model), 4)


@ref.modes
@pytest.mark.parametrize("program", PROGRAMS)
def test_layer_used_several_times(ranks, program, mode, world):
    ref.on_ranks(ranks, world, _check_program, program, mode)


def _check_bypassed(program: str, mode: str) -> None:
    def step(model: nn.Module, number: int) -> None:
        ref.backward(model, ref.loss_of(ref.bare(model)(ref.data().requires_grad_(), program)))

    ours, slow = ref.make_pair(lambda: Chain(_layers_of(program)), mode)
    ref.check_steps(ours, slow, step)


BYPASSED = ("r(L) r(L)", "r(L) r(L) r(L)", "A r(L) B r(L) C", "A r(L) B L C", "r(LA) B r(LA)")
bypassed = pytest.mark.parametrize("program", BYPASSED)


@ref.modes
@bypassed
def test_bypassed(ranks, program, mode, world):
    """The forward bypasses the wrapper, so no output shows where the backward begins."""
    ref.on_ranks(ranks, world, _check_bypassed, program, mode)


def _check_bypassed_with_unused(program: str, mode: str) -> None:
    """At the end of a checkpoint's own backward, missing parameters may still come."""

    def step(model: nn.Module, number: int) -> None:
        ref.backward(model, ref.loss_of(ref.bare(model)(ref.data().requires_grad_(), program)))

    ours, slow = ref.make_pair(lambda: Chain(_layers_of(program) + "XY"), mode)
    ref.check_steps(ours, slow, step, 4)


@pytest.mark.parametrize("mode", ["static", "static-view", "unused", "unused-view"])
@bypassed
def test_bypassed_with_unused_params(ranks, program, mode, world):
    ref.on_ranks(ranks, world, _check_bypassed_with_unused, program, mode)


class Nested(nn.Module):
    """Each layer runs in a checkpoint inside the checkpoint of the previous layer."""

    def __init__(self) -> None:
        super().__init__()
        # torch runs backwards that are nested more than 60 deep on a separate thread.
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(66))

    def forward(self, x: torch.Tensor, index: int = 0) -> torch.Tensor:
        x = x + torch.tanh(self.layers[index](x))
        if index + 1 < len(self.layers):
            x = checkpoint(self.forward, x, index + 1, use_reentrant=True)
        return x * 1.0


def _check_deep(bypass: bool, mode: str) -> None:
    def step(model: nn.Module, number: int) -> None:
        module = ref.bare(model) if bypass else model
        ref.backward(
            model, ref.loss_of(module(torch.randn(4, 3, dtype=torch.float64).requires_grad_()))
        )

    ours, slow = ref.make_pair(Nested, mode)
    ref.check_steps(ours, slow, step)
    assert ours.reducer.num_steps == 3


def _deep_cases() -> Iterator[Any]:
    """All cases. `make test` runs each mode once, and each graph mode with and without bypass."""
    for number, mode in enumerate(ref.MODES):
        for bypass, name in ((False, "wrapper"), (True, "module")):
            # The modes come in pairs, without and with views.
            marks = [] if (number + number // 2) % 2 == bypass else [pytest.mark.full_only]
            yield pytest.param(bypass, mode, id=f"{name}-{mode}", marks=marks)


@pytest.mark.parametrize(("bypass", "mode"), _deep_cases())
def test_nested_more_than_60_deep(ranks, bypass, mode):
    ref.on_ranks(ranks, 2, _check_deep, bypass, mode)


DROPPED = ("A r(B) r(C) L", "A r(C) L", "A r(B) L", "A L", "r(B) r(C) L", "A r(B) r(C) L")


def _check_dropped(per_rank: bool, mode: str) -> None:
    """Once a checkpointed layer has been used, any step may leave it out."""

    def step(model: nn.Module, number: int) -> None:
        shift = dist.get_rank() if per_rank else 0
        _chain_step(DROPPED[(number + shift) % len(DROPPED)], model)

    for first in range(3):
        ours, slow = ref.make_pair(Chain, mode)
        ref.check_steps(ours, slow, step, 6, first=first)


@pytest.mark.parametrize("mode", ["unused", "unused-view"])
@pytest.mark.parametrize("per_rank", [False, True], ids=["everywhere", "per rank"])
def test_checkpointed_layers_are_dropped(ranks, per_rank, mode, world):
    ref.on_ranks(ranks, world, _check_dropped, per_rank, mode)


def _check_branches_in_turn(bypass: bool, mode: str) -> None:
    """Each backward uses one of two checkpointed branches, or begins with the other one."""

    def accumulated(model: nn.Module, number: int) -> None:
        programs = ("r(A) L", "r(B) L")
        with model.no_sync():
            _chain_step(programs[number % 2], model)
        _chain_step(programs[1 - number % 2], model)

    def bypassed(model: nn.Module, number: int) -> None:
        program = ("r(B) r(A)", "r(A) r(B)")[number % 2]
        ref.backward(model, ref.loss_of(ref.bare(model)(ref.data().requires_grad_(), program)))

    ours, slow = ref.make_pair(Chain, mode)
    ref.check_steps(ours, slow, bypassed if bypass else accumulated, 5)


@pytest.mark.parametrize("mode", ["unused", "unused-view"])
@pytest.mark.parametrize("bypass", [False, True], ids=["no_sync", "bypassed"])
def test_checkpointed_branches_in_turn(ranks, bypass, mode, world):
    ref.on_ranks(ranks, world, _check_branches_in_turn, bypass, mode)


def _check_first_checkpoint(mode: str) -> None:
    """The first checkpointed use of a layer in a later step is an error.

    The next step is correct.
    """
    ours, slow = ref.make_pair(Chain, mode)
    programs = ("A L", "A r(B) L", "A r(B) L", "A L", "A r(B) r(C) L")
    for number, program in enumerate(programs):
        ref.zero_grads("none", ours, slow)
        ref.seed(number)
        _chain_step(program, slow)
        ref.seed(number)
        text = ref.error_of(_chain_step, program, ours)
        assert bool(text) == (number == 1), text
        if text:
            assert re.search(r"'layers\.B\.(weight|bias)'", text), text
        ref.assert_same(ours, slow, {"layers.B.weight", "layers.B.bias"} if text else set())
    ref.assert_in_step()


@pytest.mark.parametrize("mode", ["unused", "unused-view"])
def test_first_checkpoint_in_a_later_step(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_first_checkpoint, mode)


def _check_accumulation(mode: str) -> None:
    def step(model: nn.Module, number: int) -> None:
        with model.no_sync():
            _chain_step("A r(L) B r(L)", model)
        _chain_step("A r(L) B r(L)", model)

    ours, slow = ref.make_pair(lambda: Chain("ABL"), mode)
    for zero_style in ("none", "keep"):
        ref.check_steps(ours, slow, step, 3, zero_style)


@ref.modes
def test_accumulation(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_accumulation, mode)


TWICE = "A r(L) B r(L) C"
ONCE = "A r(L) B C"
THRICE = "A r(L) B r(L) r(L) C"


def _check_fewer(mode: str) -> None:
    """Gradients are correct. A static graph may instead raise an error that names the layer."""
    programs = (TWICE, ONCE, TWICE, ONCE, ONCE, TWICE)
    ours, slow = ref.make_pair(Chain, mode)
    for number, program in enumerate(programs):
        ref.zero_grads("none", ours, slow)
        ref.seed(number)
        _chain_step(program, slow)
        ref.seed(number)
        text = ref.error_of(_chain_step, program, ours)
        if text:
            assert "static" in mode, text
            assert "static_graph" in text, text
            assert re.search(r"'layers\.L\.(weight|bias)'", text), text
        ref.assert_same(ours, slow)
    ref.assert_in_step()


@ref.modes
def test_used_fewer_times(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_fewer, mode)


def _check_more(where: str, mode: str) -> None:
    """The same backward names the layer, on ranks with more parts than ever before."""
    ours, slow = ref.make_pair(Chain, mode)
    programs = (TWICE, TWICE, THRICE, TWICE, THRICE, TWICE)
    for number, program in enumerate(programs):
        ref.zero_grads("none", ours, slow)
        here = program
        if where == "rank 1" and dist.get_rank() != 1:
            here = TWICE
        ref.seed(number)
        _chain_step(here, slow)
        ref.seed(number)
        text = ref.error_of(_chain_step, here, ours)
        # A static graph learns the number of parts from its first step only.
        unheard_of = here == THRICE and ("static" in mode or number == programs.index(THRICE))
        assert bool(text) == unheard_of, text
        if text:
            assert re.search(r"'layers\.L\.(weight|bias)'", text), text
        unspecified = {"layers.L.weight", "layers.L.bias"} if ref.anywhere(unheard_of) else set()
        ref.assert_same(ours, slow, unspecified)
    ref.assert_in_step()


@ref.modes
@pytest.mark.parametrize("where", ["everywhere", "rank 1"])
def test_used_more_often_than_before(ranks, where, mode, world):
    ref.on_ranks(ranks, world, _check_more, where, mode)


def _check_more_while_in_flight() -> None:
    """An extra part is added to a view of a bucket during its all-reduce, so results may differ
    by rank.

    Only the rank with the extra part raises an error.
    """
    width = 700  # so large that the all-reduce takes longer than the third use
    for number in range(60):
        surplus = number % 3 == 1 and dist.get_rank() == 1
        if number % 3 == 0:
            model = ReducerDDP(Chain("L", width), gradient_as_bucket_view=True)
        program = "r(L) r(L) r(L)" if surplus else "r(L) r(L)"
        inputs = torch.randn(3, width, requires_grad=True)
        text = ref.error_of(ref.backward, model, ref.loss_of(model(inputs, program)))
        assert ("'layers.L." in text) == surplus, text
        assert ("different averages" in text) == surplus, text
    ref.assert_in_step()


def test_used_more_often_while_in_flight(ranks):
    ref.on_ranks(ranks, 3, _check_more_while_in_flight)
