"""``mixed_precision``: the module computes in low precision. Parameters keep their dtype.

DDP points ``param.data`` at a low-precision copy until the gradient arrives. In ddpx the copy is
a tensor of the autograd graph (:func:`ddpx._C.lowered`). The copy replaces the parameter in the
module while forward and backward run. The gradient arrives in ``param_dtype``, which the
parameter's ``grad_dtype`` of None allows. The reducer packs the gradient in ``reduce_dtype``, and
writes the mean back in the parameter's dtype. A local gradient is cast to the parameter's dtype at
once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from ddpx import _C
from ddpx.comm import transforms
from ddpx.ddp.user_module import nested
from ddpx.ddp.user_module.module_ref import ModuleRef

_DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype")
# Where a module holds a parameter: the container of a submodule, a dict or what TorchScript has
# instead, and the name in this container.
_Place = tuple[Any, str]


def check_config(
    config: Any, reduce_dtype: torch.dtype | None, grad_dtype: torch.dtype | None
) -> None:
    """Checks the argument ``mixed_precision``.

    Raises:
        TypeError: ``config`` lacks a dtype, or has a dtype that is not floating-point.
        ValueError: ``reduce_dtype`` or ``grad_dtype`` is given, too.
    """
    for field in _DTYPES:
        dtype = getattr(config, field, "missing")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"mixed_precision={config!r} has no valid {field}. Pass an object with "
                "param_dtype, reduce_dtype and buffer_dtype. Each must be a floating-point "
                "torch.dtype or None. Example: "
                "torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)."
            )
    if reduce_dtype is not None or grad_dtype is not None:
        raise ValueError(
            "mixed_precision has a reduce_dtype of its own. reduce_dtype= and grad_dtype= cannot "
            "be combined with mixed_precision=. Set mixed_precision.reduce_dtype, or leave "
            "mixed_precision out."
        )


class MixedPrecision:
    """Runs one module in mixed precision.

    The module is in one of two states. *Full*: the module holds its parameters. *Lowered*: casts
    replace the parameters. The module is lowered during forward, and during backward, because
    checkpointed layers repeat their forward in backward.

    Args:
        reference: The module. The constructor casts its floating-point buffers.
        config: An object with ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``. None means
            no change. ``reduce_dtype`` None means ``param_dtype``.
        ignored: Names of parameters and buffers that do not change.
    """

    def __init__(self, reference: ModuleRef, config: Any, ignored: Collection[str]) -> None:
        self._module = reference
        module = reference()
        self.param_dtype: torch.dtype | None = config.param_dtype
        self.reduce_dtype: torch.dtype | None = config.reduce_dtype or config.param_dtype
        self._ignored = {id(p) for name, p in module.named_parameters() if name in ignored}
        self._in_place_of: list[tuple[_Place, torch.Tensor, nn.Parameter]] = []  # empty: full
        for _, param in self._lowerable():
            # Scripts written for DDP read these attributes. DDP's _mp_param has no storage, too.
            param._mp_param = torch.empty_like(  # type: ignore[attr-defined]
                param, dtype=self.param_dtype, device="meta"
            )
            param._fp_param = param.data  # type: ignore[attr-defined]
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    def cast_inputs(self, inputs: Any) -> Any:
        """Casts the floating-point tensors of ``inputs`` to ``param_dtype``."""
        return inputs if self.param_dtype is None else nested.to_dtype(inputs, self.param_dtype)

    @contextmanager
    def forward(self) -> Iterator[list[torch.Tensor]]:
        """A context in which the module is lowered.

        The caller adds output tensors to the list. The module is lowered in their backwards, too.
        """
        outputs: list[torch.Tensor] = []
        if self.param_dtype is None or self._in_place_of:  # a forward within a backward
            yield outputs
            return
        self._lower(self._casts())
        try:
            yield outputs
            self._lower_in_backward(outputs)
        finally:
            self.restore()

    @property
    def lowered(self) -> bool:
        """Whether casts replace the parameters now."""
        return bool(self._in_place_of)

    def restore(self) -> None:
        """Makes the module full. No effect if the module is full."""
        lowered, self._in_place_of = self._in_place_of, []
        for (place, name), cast, param in lowered:
            if _held((place, name)) is cast:
                place[name] = param
        if lowered:
            self._update_rnns()

    def _lowerable(self) -> Iterator[tuple[_Place, nn.Parameter]]:
        for submodule in self._module().modules():
            for name, param in submodule._parameters.items():
                if param is None or id(param) in self._ignored:
                    continue
                if param.is_floating_point():
                    yield (submodule._parameters, name), param

    def _casts(self) -> list[tuple[_Place, torch.Tensor, nn.Parameter]]:
        casts: dict[nn.Parameter, torch.Tensor] = {}  # a parameter may have several places
        lowered = []
        for place, param in self._lowerable():
            if param not in casts:
                casts[param] = self._cast(param)
            lowered.append((place, casts[param], param))
        return lowered

    def _cast(self, param: nn.Parameter) -> torch.Tensor:
        assert self.param_dtype is not None
        # Another tensor may stand in the place of a parameter (functional_call).
        if param.is_leaf and param.requires_grad and param.grad_dtype is None:
            with transforms.outside():  # torch refuses functions in C++ within a transform
                return _C.lowered(param, self.param_dtype)
        return param.to(self.param_dtype)

    def _lower(self, lowered: Sequence[tuple[_Place, torch.Tensor, nn.Parameter]]) -> None:
        self._in_place_of = [item for item in lowered if _held(item[0]) is item[2]]
        for (place, name), cast, _ in self._in_place_of:
            place[name] = cast
        self._update_rnns()

    def _update_rnns(self) -> None:
        """Updates the lists of weights that recurrent layers keep in addition."""
        for submodule in self._module().modules():
            if isinstance(submodule, nn.RNNBase):
                submodule.__dict__["_flat_weights"] = [
                    getattr(submodule, name, None) for name in submodule._flat_weights_names
                ]

    def _lower_in_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        # Attributes of a tensor of a subclass may raise.
        with torch._C.DisableTorchFunctionSubclass():
            watched = [output for output in outputs if output.requires_grad]
        if not watched:
            return
        lowered = list(self._in_place_of)
        weak = weakref.ref(self)

        def begin(_: torch.Tensor) -> None:
            this = weak()
            if this is not None and not this._in_place_of:
                this._lower(lowered)
                Variable._execution_engine.queue_callback(_AtEndOfBackward(this.restore))

        with torch._C.DisableTorchFunctionSubclass():
            register_multi_grad_hook(watched, begin, mode="any")


def _held(place: _Place) -> object:
    container, name = place
    try:
        return container[name]
    except KeyError:
        return None


class _AtEndOfBackward:
    """Restores the module once: when called, or when a backward that raised drops the callback."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self._once = weakref.finalize(self, restore)

    def __call__(self) -> None:
        self._once()
