"""A forward that is captured by a CUDA graph is refused by name where a graph cannot repeat it.

The tests simulate a torch older than 2.12, a module on CUDA, and a captured stream.
tests/devices/test_device_failed_captures.py has the same on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.reducer import Reducer

_NUM_STEPS = 6
_CAPTURED_STEP = 4


@contextmanager
def _torch_says(is_captured: bool) -> Iterator[None]:
    captured = mock.patch.object(Reducer, "is_captured", is_captured)
    with mock.patch("ddpx.ddp.fronts.front._CAPTURE_IS_HIDDEN", True), captured:
        yield


def _step(model: ReducerDDP, x: torch.Tensor, captured: bool) -> str:
    """The error of a step, or an empty text."""
    try:
        with _torch_says(captured):
            model(x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def _texts(
    options: dict[str, Any],
    check_finite: bool = False,
    no_sync: bool = False,
    captured_step: int = _CAPTURED_STEP,
    sparse: bool = False,
    record: bool = False,
) -> list[str]:
    """The errors of the steps, of which one is captured."""
    module, x = (
        (nn.Embedding(4, 4, sparse=True), torch.tensor([1, 2]))
        if sparse
        else (nn.Linear(4, 4), torch.ones(2, 4))
    )
    model = ReducerDDP(module, **options)
    model.set_check_finite(check_finite)
    texts = []
    for step in range(_NUM_STEPS):
        context: AbstractContextManager[Any] = model.no_sync() if no_sync else nullcontext()
        if record and step == captured_step:
            context = ddpx.record(model)
        with context:
            texts.append(_step(model, x, captured=step == captured_step))
    return texts


def _check(per_rank: list[list[str]], refused: str | None, step: int = _CAPTURED_STEP) -> None:
    for texts in per_rank:
        assert not any(texts[:step] + texts[step + 1 :])
        if refused is None:
            assert texts[step] == ""
        else:
            assert "a step is captured into a CUDA graph" in texts[step]
            assert refused in texts[step]


@pytest.mark.parametrize(
    "options, check_finite, refused",
    [
        ({"find_unused_parameters": True}, False, "find_unused_parameters"),
        ({}, True, "set_check_finite()"),
        ({}, False, None),
        ({"static_graph": True}, False, None),
    ],
    ids=["find unused", "check_finite", "default", "static"],
)
@pytest.mark.parametrize("no_sync", [False, True], ids=["", "no_sync"])
def test_forward_under_capture(ranks, options, check_finite, refused, no_sync):
    texts = ranks(2).run(_texts, options, check_finite, no_sync)
    _check(texts, None if no_sync else refused)


def test_sparse_gradients(ranks):
    _check(ranks(2).run(_texts, {}, sparse=True), "the gradient of parameter 'weight' is sparse")


@pytest.mark.parametrize("static, step", [(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)])
def test_first_steps(ranks, static, step):
    texts = ranks(2).run(_texts, {"static_graph": static}, captured_step=step)
    _check(texts, "Run at least 3 training steps", step)


def test_a_rank_without_buckets_needs_no_first_steps(ranks):
    _check(ranks(1).run(_texts, {}, captured_step=0), None, 0)


def test_recording(ranks):
    _check(ranks(2).run(_texts, {}, record=True), "a recording runs")


def _failed_then_trained(**options: Any) -> tuple[str, list[torch.Tensor], torch.Tensor]:
    """A backward that raises under capture, and the gradients of later steps."""
    model = ReducerDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options)
    x = torch.ones(2, 4) * (1 + torch.distributed.get_rank())
    for _ in range(_CAPTURED_STEP):
        _step(model, x, captured=False)
    hook = model.module[0].weight.register_hook(lambda grad: grad.new_zeros(1) / "not a number")
    with pytest.raises(TypeError), _torch_says(True):
        model(x).sum().backward()
    hook.remove()
    model.set_check_finite(False)
    phase = str(model.reducer.phase)
    grads = []
    for _ in range(2):
        model.zero_grad()
        assert _step(model, x, captured=False) == ""
        grads.append(model.module[1].bias.grad.clone())
    return phase, grads, torch.full((4,), 2.0)


@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
def test_steps_after_a_failed_capture(ranks, view):
    for phase, grads, expected in ranks(2).run(_failed_then_trained, gradient_as_bucket_view=view):
        assert phase == "Phase.IDLE"
        for grad in grads:
            torch.testing.assert_close(grad, expected)
