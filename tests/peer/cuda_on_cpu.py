"""Runs tests that require GPUs on a CPU: tensors that they put on "cuda" are on the CPU.

Two layers do this, both in the same way for every class under test:

* The test modules get a ``torch`` of their own (:func:`_torch`), whose ``torch.cuda`` and
  ``torch.accelerator`` have ``DEVICES`` devices that all mean the CPU. torch itself still sees no
  CUDA: otherwise it would call parts that a CPU build does not have.
* Functions that tests reach without that name are patched in their own modules: ``Tensor.to``,
  ``Module.cuda``, streams and events (empty, since on a CPU work is done when the call returns),
  and ``init_device_mesh``.

torch refuses SyncBatchNorm on CPUs, since it has no kernels there. ``sync_batch_norm_kernels`` has
these kernels.

One thing is not simulated: a tensor's ``device`` is the CPU, so a test that reads it fails for each
class.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

DEVICES = 8

# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor",
    "zeros", "zeros_like",
)
# fmt: on


def is_cuda(device: Any) -> bool:
    """Whether ``device`` names an accelerator, in any form that torch accepts."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def to_cpu(device: Any) -> Any:
    """The device that stands for ``device``. Returns values unchanged that are no devices."""
    return torch.device("cpu") if is_cuda(device) else device


def _kwarg_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its keyword ``device`` redirected."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return redirected


def _first_to_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` with its first argument (after self) and its keyword ``device`` redirected."""

    @functools.wraps(method)
    def redirected(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (to_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        return method(self, *args, **kwargs)

    return redirected


class NoStream:
    """Stands for a stream. On a CPU, work is done when the call returns."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    synchronize = wait_stream = wait_event = wait = record = _nothing

    def record_event(self, event: NoEvent | None = None) -> NoEvent:
        return event or NoEvent()

    def query(self) -> bool:
        return True


class NoEvent(NoStream):
    """Stands for an event that has always happened."""


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _empty_context(*_args: Any, **_kwargs: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _a_stream(*_args: Any, **_kwargs: Any) -> NoStream:
    return NoStream()


class _Module(types.ModuleType):
    """A module with some names of its own. All others come from ``base``."""

    def __init__(self, base: types.ModuleType, own: dict[str, Any]) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(own)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


def _cuda() -> _Module:
    """A ``torch.cuda`` whose devices are the CPU."""
    return _Module(
        torch.cuda,
        {
            "is_available": lambda: True,
            "device_count": lambda: DEVICES,
            "current_device": lambda: 0,
            "set_device": _nothing,
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "device": _empty_context,
            "stream": _empty_context,
            "Stream": NoStream,
            "Event": NoEvent,
            "current_stream": _a_stream,
            "default_stream": _a_stream,
            # Values drawn on "cuda" are drawn on the CPU, so the CPU's generator must be seeded.
            "manual_seed": torch.manual_seed,
            "manual_seed_all": torch.manual_seed,
        },
    )


def _accelerator() -> _Module:
    """A ``torch.accelerator`` whose devices are the CPU. Tests of torch 2.14 and newer ask it."""
    return _Module(
        torch.accelerator,
        {
            "is_available": lambda: True,
            "device_count": lambda: DEVICES,
            "current_device_index": lambda: 0,
            "set_device_index": _nothing,
        },
    )


def _device(device: Any, *index: int) -> torch.device:
    """``torch.device``, which would refuse a plain number without an accelerator."""
    return to_cpu(device) if is_cuda(device) else torch.device(device, *index)


def _torch() -> _Module:
    """The ``torch`` that a test module sees."""
    own: dict[str, Any] = {name: _kwarg_to_cpu(getattr(torch, name)) for name in _FACTORIES}
    own["device"] = _device
    own["cuda"] = _cuda()
    own["accelerator"] = _accelerator()
    return _Module(torch, own)


def _patch_torch() -> None:
    """Redirects what test modules reach without the name ``torch``."""
    torch.Tensor.to = _first_to_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(torch.Tensor, name, _kwarg_to_cpu(getattr(torch.Tensor, name)))
    nn.Module.to = _first_to_cpu(nn.Module.to)  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    # With mixed precision, or an optimizer in backward, DDP creates streams on any device.
    torch.Stream = NoStream  # type: ignore[misc, assignment]
    torch.Event = NoEvent  # type: ignore[misc, assignment]
    torch.accelerator.current_stream = _a_stream  # type: ignore[assignment]
    torch.accelerator.synchronize = _nothing

    import torch.distributed.device_mesh as device_mesh

    make_mesh = device_mesh.init_device_mesh

    @functools.wraps(make_mesh)
    def mesh_on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make_mesh("cpu" if is_cuda(device_type) else device_type, *args, **kwargs)

    device_mesh.init_device_mesh = mesh_on_cpu
    torch.distributed.init_device_mesh = mesh_on_cpu


def install(test_modules: Sequence[types.ModuleType]) -> None:
    """Redirects CUDA to the CPU in ``test_modules`` and in the classes of torch that they use."""
    _patch_torch()
    for module in test_modules:
        names = vars(module)
        if "torch" in names:
            names["torch"] = _torch()
        if "TEST_CUDA" in names:
            names["TEST_CUDA"] = True
        if "autocast" in names:
            names["autocast"] = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
        if "GradScaler" in names:
            names["GradScaler"] = functools.partial(torch.amp.GradScaler, "cpu")
