"""The names of DDP, in public and in private, that only a wrapper has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ddpx.ddp.arguments.placement import Placement
from ddpx.ddp.fronts.front import Front, set_attributes
from ddpx.ddp.interface.torch_only import ATTRIBUTES_OF_WRAPPER, TorchOnlyNames
from ddpx.ddp.replica.replica import Replica
from ddpx.ddp.user_module import nested


class DDPInterface(nn.Module, Front, TorchOnlyNames):
    """Attributes and methods of DDP that only a wrapper has.

    Trainers and torch's own code use them.
    """

    def __init__(
        self,
        replica: Replica | None = None,
        place: Placement | None = None,
        device_mesh: Any = None,
        dim: int = 0,
    ) -> None:
        """Sets the attributes that scripts written for DDP read.

        Without arguments this is ``nn.Module.__init__``: a class of mmengine that derives from DDP
        calls ``super(DistributedDataParallel, self).__init__()`` and leaves out DDP's constructor.
        """
        super().__init__()
        if replica is None or place is None:
            return
        Joinable.__init__(self)
        options = replica.options
        set_attributes(self, replica, place, device_mesh)
        self.module = replica.module
        self.dim = dim
        self.batched_grad_copy = options.batched_grad_copy
        self.skip_all_reduce_unused_params = options.skip_all_reduce_unused_params
        self.lazy_bucket_allocation = options.lazy_bucket_allocation
        self.bucket_bytes_cap_list = list(options.listed_cap_bytes)
        self.bucket_bytes_cap_default = options.first_cap_bytes < options.cap_bytes
        # Switches of DDP that have no effect here: no reducer in Python, no copies of outputs, no
        # second stream for copies of inputs, no hooks of torch.compile.
        self._use_python_reducer = False
        self._ddp_sink_clone = True
        self.use_side_stream_for_tensor_copies = False
        self._accum_grad_hooks: list[Any] = []

    def __dir__(self) -> list[str]:
        """Names without those that raise when they are read.

        Code that reads every attribute then works, such as ``inspect.getmembers()`` and
        ``torch.jit.trace()``.
        """
        return [name for name in super().__dir__() if name not in ATTRIBUTES_OF_WRAPPER]

    def __prepare_scriptable__(self) -> NoReturn:
        """torch.jit.script calls this method before it compiles the wrapper.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "torch.jit.script cannot compile a ReducerDDP, because its forward has any number of "
            "arguments. Compile the module: ReducerDDP(torch.jit.script(module))."
        )

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        """Raises an error that :meth:`_get_ddp_logging_data` then has."""
        self._ddpx.error = f"{err_type.__name__}: {err_msg}"
        raise err_type(err_msg)

    def _check_default_group(self) -> None:
        """Checks that the wrapper can be copied.

        Raises:
            RuntimeError: The process group is not the default process group.
        """
        if not dist.is_initialized() or self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. Other process groups cannot be pickled or copied. Save "
                "wrapper.module.state_dict() instead."
            )

    # ---- parameters and inputs -----------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Makes a later wrapper of ``module`` ignore these parameters and buffers, by full name."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        """The parameters that the wrapper does not ignore, and whose all-reduce is not delayed."""
        delayed = {id(param) for param in self._delay_all_reduce_params}
        return [
            param
            for name, param in self.module.named_parameters()
            if name not in self.parameters_to_ignore and id(param) not in delayed
        ]

    @property
    def _delay_all_reduce_params(self) -> list[nn.Parameter]:
        """The parameters of ``delay_all_reduce_named_params``."""
        return [param for _, param in self._ddpx.options.delayed.named_params or ()]

    @property
    def _delay_all_reduce_all_params(self) -> bool:
        """Whether the all-reduce of all parameters is delayed."""
        return self.reducer.delays_all_params

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Has no effect: outputs are never copied."""
        self._ddp_sink_clone = val

    def _check_reducer_finalized(self) -> None:
        """Raises RuntimeError if :meth:`finalize_backward` has yet to end a step."""
        self.reducer._check_reducer_finalized()

    def _get_parameters(self, m: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters of ``m``. A shared parameter occurs several times, as in DDP."""
        for module in m.modules() if recurse else [m]:
            yield from module.parameters(recurse=False)

    @property
    def _active_ddp_module(self) -> nn.Module | None:
        """The wrapper whose forward runs."""
        return DistributedDataParallel._active_ddp_module

    @classmethod
    def _get_active_ddp_module(cls) -> nn.Module | None:
        """The wrapper whose forward runs. Dynamo splits graphs at the buckets of this wrapper."""
        return DistributedDataParallel._active_ddp_module

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int]) -> Any:
        """Splits tensors along the batch dimension over accelerators, as in DDP.

        Args:
            inputs: Positional arguments, possibly nested.
            kwargs: Keyword arguments.
            device_ids: Indices of accelerators.

        Returns:
            A tuple of positional arguments and a tuple of keyword arguments for each device.

        Example:
            >>> args, kwargs = model.scatter((torch.ones(8, 4),), {}, [0, 1])
            >>> [tensor.shape for (tensor,) in args]
            [torch.Size([4, 4]), torch.Size([4, 4])]
        """
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Joins tensors of several accelerators along the batch dimension, as in DDP.

        Args:
            outputs: One output for each device. The outputs have the same structure.
            output_device: The device of the result.

        Returns:
            One output, on ``output_device``.

        Example:
            >>> parts = [torch.ones(4, 4, device="cuda:0"), torch.ones(4, 4, device="cuda:1")]
            >>> model.gather(parts, 0).shape
            torch.Size([8, 4])
        """
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Moves arguments of the module to a device, as in DDP.

        Args:
            inputs: Positional arguments, possibly nested.
            kwargs: Keyword arguments.
            device_id: The index of a device of the module's device type.

        Returns:
            A tuple with the positional arguments, and a tuple with the keyword arguments. Each
            tuple has one element.

        Example:
            >>> args, kwargs = model.to_kwargs((inputs,), {"scale": 2}, 0)
            >>> args[0][0].shape, kwargs
            (torch.Size([8, 4]), ({'scale': 2},))
        """
        device = torch.device(self.device_type, device_id)
        return (nested.to_device(inputs, device),), (nested.to_device(kwargs, device),)
