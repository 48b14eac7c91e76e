"""The names that DDP has, in public and in private, delegated to the parts of a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ddpx import errors, params
from ddpx.comm import state_sync
from ddpx.ddp import nested, optimizers, plan_search
from ddpx.ddp.comm_hooks import check_hook
from ddpx.ddp.dynamo import ActiveWrapper
from ddpx.ddp.finalization import Finalization
from ddpx.ddp.join_interface import JoinInterface
from ddpx.ddp.placement import Placement
from ddpx.ddp.replica import Replica
from ddpx.ddp.torch_only import TorchOnlyNames
from ddpx.params.dtensors import check_dtensors


class DDPInterface(JoinInterface, Finalization, TorchOnlyNames):
    """Attributes and methods of DDP besides ``forward`` and ``no_sync``.

    Trainers and torch's own code use them. A wrapper derives from this class and makes the parts.
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
        self._ddpx = replica
        self.module = replica.module
        self.parameters_to_ignore = replica.ignored
        self.mixed_precision = options.mixed_precision
        self.device_mesh = device_mesh
        self.dim = dim
        self.device = place.device
        self.device_type = place.device.type
        self.is_multi_device_module = place.is_multi_device
        self.device_ids = place.device_ids
        self.output_device = place.output_device
        self.find_unused_parameters = options.find_unused_parameters
        self.gradient_as_bucket_view = options.gradient_as_bucket_view
        self.static_graph = options.static_graph
        self.batched_grad_copy = options.batched_grad_copy
        self.skip_all_reduce_unused_params = options.skip_all_reduce_unused_params
        self.lazy_bucket_allocation = options.lazy_bucket_allocation
        self.bucket_bytes_cap = options.cap_bytes
        self.bucket_bytes_cap_list = list(options.listed_cap_bytes)
        self.bucket_bytes_cap_default = options.first_cap_bytes < options.cap_bytes
        self.broadcast_bucket_size = state_sync.BROADCAST_BYTES
        self._lazy_init_ran = False
        # Switches of DDP that have no effect here: no reducer in Python, no copies of outputs, no
        # second stream for copies of inputs, no hooks of torch.compile.
        self._use_python_reducer = False
        self._ddp_sink_clone = True
        self.use_side_stream_for_tensor_copies = False
        self._accum_grad_hooks: list[Any] = []

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

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Checks that the layers of ``module`` work on its device. The constructor calls this.

        Raises:
            ValueError: A module on the CPU has SyncBatchNorm layers.
        """
        names = [n for n, m in module.named_modules() if isinstance(m, nn.SyncBatchNorm)]
        if names and self.device_type == "cpu":
            raise ValueError(
                "SyncBatchNorm layers only work with GPU modules, but this module is on CPU and "
                f"has {errors.count_names(names, 'SyncBatchNorm layer')}. Move the module to an "
                "accelerator before wrapping, or do not call convert_sync_batchnorm() on CPU."
            )

    # ---- synchronization of gradients ----------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward averages gradients. Assignment is allowed, as in DDP."""
        return self.reducer.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.sync_enabled = bool(value)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Makes ``hook(state, bucket)`` communicate each bucket, in place of the all-reduce.

        The interface is that of DDP.

        Args:
            state: The first argument of the hook.
            hook: A function. ``bucket`` is a ``torch.distributed.GradBucket`` with gradients that
                are not divided by the number of ranks. The function returns a
                ``torch.futures.Future`` of a tensor with the averaged gradients, in the shape of
                ``bucket.buffer()``.

        Raises:
            TypeError: The hook is not callable.
            ValueError: The hook has annotations of other types.
            RuntimeError: The wrapper has a hook already, or a backward is running.

        Example:
            >>> from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
            >>> model.register_comm_hook(None, default_hooks.bf16_compress_hook)
            >>> model(inputs).sum().backward()
            >>> model.module.weight.grad
            tensor([[16., 16., 16., 16.]])
        """
        self._check_comm_hook(hook)
        self._ddpx.exclude_search("register_comm_hook()")
        self._ddpx.comm_hook.register(self.reducer, state, hook)

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        """Raises TypeError or ValueError if ``hook`` cannot be a communication hook."""
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self._ddpx.error = f"{type(error).__name__}: {error}"
            raise

    @property
    def _comm_hooks(self) -> list[tuple[Callable[..., Any], object]]:
        """The communication hook in Python, with its state."""
        registered = self._ddpx.comm_hook.registered
        return [] if registered is None else [registered]

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Makes a hook in C++ communicate each bucket: ``ALLREDUCE`` or ``FP16_COMPRESS``."""
        self._ddpx.exclude_search("_register_builtin_comm_hook()")
        self._ddpx.comm_hook.register_builtin(self.reducer, comm_hook_type)

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Iterable[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Runs an optimizer on each bucket as soon as the bucket is averaged, as in DDP.

        Raises:
            RuntimeError: torch has no functional form of ``optim``.
            ValueError: Parameters are DTensors; or ``reduce_dtype`` or ``grad_dtype`` is set.
        """
        optimizers.register_fused(self, self._ddpx.options, optim, args, kwargs, optim_params)
        self._ddpx.comm_hook.runs_optimizer = True

    def _lazy_init(self) -> None:
        """Called by the first forward: what user code may set up until then."""
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    def _setup_in_backward_optimizers(self) -> None:
        """Makes optimizers of ``_apply_optimizer_in_backward()`` run on averaged gradients."""
        if optimizers.take_over(self, self._ddpx.options):
            self._ddpx.comm_hook.runs_optimizer = True

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets are in arrival order. torch's hooks for ZeRO optimizers read this."""
        return bool(self.reducer.arrival_order)

    @_has_rebuilt_buckets.setter
    def _has_rebuilt_buckets(self, value: bool) -> None:
        """Has no effect: the reducer knows. Code of DDP's forward assigns this attribute."""

    def _set_static_graph(self) -> None:
        """Has the effect of ``static_graph=True``. Allowed before the first backward."""
        self.reducer.set_static_graph()
        self.static_graph = True

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, torch.Tensor]) -> None:
        """Sets the rows in which sparse gradients have entries, from the next backward on.

        The sparse gradients of these parameters are then summed as dense blocks of these rows.
        Every rank passes the same rows. An entry in another row is an error that names the row.

        Args:
            global_unique_ids: The rows in which any rank has entries, by parameter name.
        """
        self.reducer._set_sparse_metadata(global_unique_ids)

    def _remove_autograd_hooks(self) -> None:
        """Removes the hooks on parameters. No later backward is synchronized."""
        self._ddpx.averaging.end()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Averages over other ranks from here on. The caller makes these ranks agree."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            return
        replica = self._ddpx
        replica.comm_hook.check_group_can_change()
        check_dtensors(self.module, self.parameters_to_ignore, new_process_group)
        replica.reducer.move_to(new_process_group)
        replica.group = new_process_group
        replica.search = plan_search.begin(replica)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measures the times of the first ten steps, and then of every ``sample_rate``-th step."""
        if sample_rate < 1:
            raise ValueError(
                "DDP runtime logging sample rate should be equal or greater than 1, but got "
                f"{sample_rate!r}."
            )
        self.reducer.set_sample_rate(sample_rate)

    def _check_reducer_finalized(self) -> None:
        """Has no effect: a backward that does not finish raises by itself."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Has no effect: outputs are never copied."""
        self._ddp_sink_clone = val

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

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[nn.Parameter | tuple[str, nn.Parameter]]:
        """Yields the parameters that a wrapper of ``module`` does not ignore."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

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

    def _get_parameters(self, m: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters of ``m``. A shared parameter occurs several times, as in DDP."""
        for module in m.modules() if recurse else [m]:
            yield from module.parameters(recurse=False)

    def _inside_ddp_forward(self) -> AbstractContextManager[None]:
        """A context in which this wrapper is the active wrapper, as for torch.compile."""
        return ActiveWrapper(self)

    @property
    def _active_ddp_module(self) -> nn.Module | None:
        """The wrapper whose forward runs."""
        return DistributedDataParallel._active_ddp_module

    @classmethod
    def _get_active_ddp_module(cls) -> nn.Module | None:
        """The wrapper whose forward runs. Dynamo splits graphs at the buckets of this wrapper."""
        return DistributedDataParallel._active_ddp_module

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The averaged parameters, and which of them get sparse gradients."""
        managed = params.managed_params(self.module, self.parameters_to_ignore)
        return [p.tensor for p in managed], [p.expect_sparse for p in managed]

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[nn.Parameter]
    ) -> dict[int, str]:
        """The name of each of ``parameters``, by index."""
        managed = params.managed_params(self.module, self.parameters_to_ignore)
        return params.names_by_index(managed, parameters)

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
