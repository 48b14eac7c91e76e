"""Transforms of torch.func, such as vmap and grad, and forward-mode derivatives.

Communication within them runs as outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import forward_ad

_FRONT_MODE_KEY = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
_NO_TRANSFORM: AbstractContextManager[object] = nullcontext()


def active() -> bool:
    """Whether a transform, or a forward-mode derivative, runs on this thread."""
    return _in_transform() or forward_ad._current_level >= 0


def in_graph(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that :meth:`Tensor.backward` may reach: values and derivatives, not wrapped."""
    for tensor in tensors:
        dual = forward_ad.unpack_dual(tensor)
        yield unwrapped(tensor)
        if dual.tangent is not None:
            yield unwrapped(dual.tangent)


def outside() -> AbstractContextManager[object]:
    """While the context lasts, no transform runs on this thread."""
    if not _in_transform():
        return _NO_TRANSFORM
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def _in_transform() -> bool:
    """Whether a transform runs on this thread.

    A call of functorch would allocate functorch's state of this thread. Each node of a later
    backward copies this state, also in models that ddpx does not wrap.
    ``benchmarks/before_after.py --measure instructions`` shows the cost.
    """
    return torch._C._dispatch_tls_is_dispatch_key_included(_FRONT_MODE_KEY)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the memory of ``tensor``, which transforms may have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
