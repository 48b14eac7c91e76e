"""The parts of a wrapper that exist while the wrapper averages gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.distributed as dist

from ddpx import params
from ddpx.comm.transport import Transport
from ddpx.ddp.arguments.options import Options
from ddpx.ddp.user_module.mixed_precision import MixedPrecision
from ddpx.ddp.user_module.module_ref import ModuleRef
from ddpx.ddp.user_module.structure import Structure
from ddpx.params.grad_dtypes import GradDtypes
from ddpx.reducer import Reducer


class Averaging:
    """A reducer over the parameters of a module, and what belongs to this reducer.

    A wrapper owns this object, as long as the wrapper lives. A copy of the wrapper makes its own.

    Attributes:
        managed: The averaged parameters.
        reducer: The reducer.
        structure: The layers and parameters of the module.
        precision: The casts of ``mixed_precision``. None without this argument.
        may_have_yielded: Whether another wrapper may average these parameters now.
    """

    def __init__(
        self,
        reference: ModuleRef,
        ignored: Collection[str],
        managed: Sequence[params.ManagedParam],
        group: dist.ProcessGroup,
        transport: Transport | None,
        options: Options,
    ) -> None:
        param_dtype = getattr(options.mixed_precision, "param_dtype", None)
        module = reference()
        self.structure = Structure(reference, ignored, managed)
        self._grad_dtypes = GradDtypes(
            managed, options.reduce_dtype, options.grad_dtype, param_dtype
        )
        self.managed, trigger = options.delayed.mark(managed)
        self.param_ids = frozenset(id(param.tensor) for param in self.managed)
        frozen = params.frozen_params(module, ignored)
        self.reducer = Reducer(
            self.managed,
            frozen,
            group,
            transport,
            options.of_reducer(self.managed, trigger, module),
        )
        self.precision: MixedPrecision | None = None
        if options.mixed_precision is not None:
            self.precision = MixedPrecision(reference, options.mixed_precision, ignored)
        self.may_have_yielded = False

    @property
    def has_yielded(self) -> bool:
        """Whether another wrapper averages the parameters now."""
        return self.may_have_yielded and self.reducer.yielded

    def make_room(self) -> None:
        """Another wrapper is about to average the parameters."""
        self.may_have_yielded = True
        self._grad_dtypes.reset()

    def take_back(self, for_good: bool) -> None:
        """Averages the parameters again. The other wrappers have yielded.

        Args:
            for_good: Only a forward or a construction of another wrapper ends this. False: so does
                a backward of another wrapper, which has more parameters.
        """
        self.reducer.take_back()
        self._grad_dtypes.apply()
        self.may_have_yielded = not for_good

    def end(self) -> None:
        """Removes the hooks of the reducer. No later backward is synchronized."""
        self.reducer.remove_hooks()
        self._grad_dtypes.reset()
