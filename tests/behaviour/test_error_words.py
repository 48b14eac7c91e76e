"""Errors name the phase in words, whatever a rank is doing, and never by an internal name."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_groups import BrokenWork, RecordingGroup
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpx import ReducerDDP
from ddpx._C import Phase


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def _error_of(function: Any, *args: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        function(*args)
    return str(caught.value)


def _second_hook() -> str:
    model = ReducerDDP(_two_layers())
    model.register_comm_hook(None, allreduce_hook)
    return _error_of(model.register_comm_hook, None, allreduce_hook)


def _changed_before_forward() -> str:
    return _error_of(_step, ReducerDDP(_two_layers()).double())


def _before_the_first_gradient() -> str:
    model = ReducerDDP(_two_layers())
    output = model(torch.ones(2, 4)).sum()
    model.reducer.prepare_for_backward([])
    return _error_of(torch.autograd.grad, output, list(model.parameters()))


def _within_backward() -> str:
    """The first step counts the parts of each gradient, so the second has a launch to fail in."""
    model = ReducerDDP(_two_layers())
    _step(model)
    texts = []
    model.module[0].weight.register_hook(lambda _: texts.append(_error_of(model.set_check_finite)))
    _step(model)
    return texts[0]


def _while_ranks_communicate() -> str:
    model = ReducerDDP(_two_layers())
    texts = []

    def answer_late(bucket: dist.GradBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        while model.reducer.phase != Phase.FINALIZING:
            threading.Event().wait(0.001)
        texts.append(_error_of(model.set_check_finite))
        future.set_result(bucket.buffer())

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        threading.Thread(target=answer_late, args=(bucket, future)).start()
        return future

    model.register_comm_hook(None, hook)
    _step(model)
    return texts[0]


class _CutOff(RecordingGroup):
    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        return BrokenWork()


def _while_buckets_are_rebuilt() -> str:
    model = ReducerDDP(_two_layers(), process_group=_CutOff([]), init_sync=False)
    _step(model)
    return _error_of(_step, model)


PLACES = {
    _second_hook: "step 0, phase outside backward",
    _changed_before_forward: "step 0, phase outside backward",
    _before_the_first_gradient: "step 0, phase backward",
    _within_backward: "step 1, phase backward",
    _while_ranks_communicate: "step 0, phase end of backward",
    _while_buckets_are_rebuilt: "step 1, phase rebuilding buckets",
}


@pytest.mark.parametrize("mistake", PLACES)
def test_phase_is_in_words(ranks, mistake):
    for rank, text in enumerate(ranks(2).run(mistake)):
        assert text.startswith(f"[ddpx rank {rank}, {PLACES[mistake]}] "), text
        assert not re.search(r"Idle|Rebuilding|Collecting|Finalizing|Failed|kIdle|Phase", text)
        assert "reducer" not in text and "shadow" not in text
