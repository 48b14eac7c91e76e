"""Settings of the process, and modes of the thread, around a part of a training: DDP's bits."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from modes import MODES
from torch import nn
from torch.nn.modules import module as all_modules
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ddpx import ReducerDDP

NUM_STEPS = 5
PLACES = ("construction", "forward", "backward", "every second backward", "training")


class _EveryFunction(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


class _EveryOperator(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


@contextmanager
def _set(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _set(torch.set_default_dtype, dtype, torch.float32)


@contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def _hooks_of_all_modules() -> Iterator[None]:
    handles = [
        all_modules.register_module_forward_pre_hook(lambda module, args: None),
        all_modules.register_module_forward_hook(lambda module, args, output: None),
        all_modules.register_module_full_backward_hook(lambda module, inputs, outputs: None),
        all_modules.register_module_parameter_registration_hook(lambda module, name, param: None),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copied_when_saved() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.clone(), lambda copy: copy
    )


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    # No operation can read a tensor on this device.
    "default device": lambda: torch.device("meta"),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default dtype bfloat16": lambda: _default_dtype(torch.bfloat16),
    "function mode": _EveryFunction,
    "dispatch mode": _EveryOperator,
    "FLOP counter": lambda: FlopCounterMode(display=False),
    "inference mode": torch.inference_mode,
    "anomaly detection": torch.autograd.detect_anomaly,
    "deterministic algorithms": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "saved tensors hooks": _copied_when_saved,
    "hooks of all modules": _hooks_of_all_modules,
    "no threads of autograd": lambda: torch.autograd.set_multithreading_enabled(False),
    "warnings are errors": _warnings_are_errors,
    "profiler with stacks": lambda: torch.profiler.profile(with_stack=True, record_shapes=True),
    "frequent garbage collection": lambda: _set(gc.set_threshold, 1, gc.get_threshold()[0]),
}
# With torch's class these raise: buffers, buckets or graphs of inference tensors.
REFUSED = {"inference mode": ("construction", "forward", "training")}


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.norm(self.embedding(rows)).relu())


def _trained(cls: type[nn.Module], mode: str, setting: str, place: str) -> list[torch.Tensor]:
    def context(*places: str) -> AbstractContextManager[Any]:
        return SETTINGS[setting]() if place in places else nullcontext()

    torch.manual_seed(0)
    module = _Module()
    with context("construction"):
        model = cls(module, bucket_cap_mb=0.0002, **MODES[mode])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(torch.distributed.get_rank())
    inputs = [torch.randint(5, (6,)) for _ in range(NUM_STEPS)]
    grads = []
    with context("training"):
        for step, rows in enumerate(inputs):
            optimizer.zero_grad()
            with context("forward"):
                loss = model(rows).square().mean()
            with context("backward", *["every second backward"] * (step % 2)):
                loss.backward()
            grads += [param.grad.clone() for param in model.parameters()]
            optimizer.step()
    return [*grads, *module.state_dict().values()]


def _check(setting: str) -> None:
    for place in PLACES:
        if place in REFUSED.get(setting, ()):
            continue
        for mode in MODES:
            expected, ours = (
                _trained(cls, mode, setting, place) for cls in (DistributedDataParallel, ReducerDDP)
            )
            assert any(tensor.abs().max() > 0 for tensor in expected)
            for theirs, own in zip(expected, ours, strict=True):
                assert own.dtype == theirs.dtype, (place, mode)
                assert torch.equal(theirs, own), (place, mode)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", SETTINGS)
def test_setting(ranks, setting):
    ranks(2).run(_check, setting)
