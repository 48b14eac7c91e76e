"""The names that DDP has, in public and in private, delegated to the parts of a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ddpx import params
from ddpx.comm import state_sync
from ddpx.ddp import nested
from ddpx.ddp.averaging import Averaging
from ddpx.ddp.buffers import BufferSync
from ddpx.ddp.comm_hooks import CommHook
from ddpx.ddp.join import UnevenInputs
from ddpx.ddp.optimizers import OptimizersInBackward
from ddpx.ddp.options import Options
from ddpx.ddp.placement import Placement
from ddpx.ddp.post_sync import PostSync
from ddpx.params.delayed import DelayedParams
from ddpx.params.dtensors import check_dtensors
from ddpx.reducer import Reducer


class DDPInterface(nn.Module, Joinable):
    """Attributes and methods of DDP besides ``forward`` and ``no_sync``.

    Trainers and torch's own code use them. A wrapper derives from this class and makes the parts.
    """

    module: nn.Module
    process_group: dist.ProcessGroup
    parameters_to_ignore: frozenset[str]
    reducer: Reducer
    _options: Options
    _delayed: DelayedParams
    _averaging: Averaging
    _buffer_sync: BufferSync
    _comm_hook: CommHook
    _optimizers: OptimizersInBackward
    _post_sync: PostSync
    _uneven: UnevenInputs
    _authoritative_rank: int  # the rank whose model all ranks have after a join context

    def _managed(self) -> Sequence[params.ManagedParam]:
        """The averaged parameters. Empty if a newer wrapper averages, or construction failed."""
        averaging: Averaging | None = self.__dict__.get("_averaging")
        if averaging is None or averaging.successor is not None:
            return []
        return averaging.managed

    def _set_ddp_attributes(self, options: Options, place: Placement, dim: int) -> None:
        """Sets the attributes that scripts written for DDP read."""
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
        self.bucket_bytes_cap = options.cap_bytes
        self.bucket_bytes_cap_list = list(options.listed_cap_bytes)
        self.broadcast_bucket_size = state_sync.BROADCAST_BYTES
        self.logger = None  # DDP has an object of torch's C++ core here

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
        self._comm_hook.register(self.reducer, state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Makes a hook in C++ communicate each bucket: ``ALLREDUCE`` or ``FP16_COMPRESS``."""
        self._comm_hook.register_builtin(self.reducer, comm_hook_type)

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
        self._optimizers.register_fused(self, self._options, optim, args, kwargs, optim_params)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets are in arrival order. torch's hooks for ZeRO optimizers read this."""
        return bool(self.reducer.arrival_order)

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
        self._averaging.end()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Averages over other ranks from here on. The caller makes these ranks agree."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            return
        self._comm_hook.check_group_can_change()
        check_dtensors(self.module, self.parameters_to_ignore, new_process_group)
        self._averaging.move_to(new_process_group)
        self.process_group = new_process_group

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measures the times of the first ten steps, and then of every ``sample_rate``-th step."""
        if sample_rate < 1:
            raise _bad_sample_rate(sample_rate)
        self.reducer.set_sample_rate(sample_rate)

    def _check_reducer_finalized(self) -> None:
        """Has no effect: a backward that does not finish raises by itself."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Has no effect: outputs are never copied."""

    # ---- buffers -------------------------------------------------------------------------------

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether forwards broadcast buffers. Assignment is allowed, as in DDP."""
        return self._buffer_sync.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._buffer_sync.enabled = value

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self._buffer_sync.enabled

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._buffer_sync.enabled = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the last forward was synchronized. The next forward else skips the broadcast."""
        return self._buffer_sync.last_forward_was_synchronized

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._buffer_sync.last_forward_was_synchronized = value

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that forwards broadcast."""
        return self._buffer_sync.tensors

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that forwards broadcast, by name."""
        return self._buffer_sync.named

    @property
    def buffer_hook(self) -> _BufferCommHook | None:
        """The hook in place of the broadcast. None without a hook."""
        return self._buffer_sync.hook

    def will_sync_module_buffers(self) -> bool:
        """Returns whether the next forward synchronizes buffers.

        Example:
            >>> model.will_sync_module_buffers()  # a linear layer has no buffers
            False
        """
        return self._buffer_sync.will_sync()

    def _assign_modules_buffers(self) -> None:
        """Reads the buffers of the module again, because user code may have replaced them."""
        self._buffer_sync.refresh()

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Replaces the broadcast by ``hook(state, named_buffers)``, before or after forward.

        The end of backward waits for the futures that the hook returns in a list.
        """
        self._buffer_sync.set_hook(state, hook, comm_hook_location)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcasts ``bufs``, or all buffers. Buffer hooks call this method."""
        self._buffer_sync.broadcast(bufs, self.process_group, authoritative_rank)

    # ---- uneven inputs -------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Returns a context for a training loop in which ranks have different numbers of batches.

        A rank that has no more batches takes part in the communication of the other ranks. At the
        end of the context, all ranks get the model of the last rank that had batches.

        Args:
            divide_by_initial_world_size: True, the default, divides gradients by the number of all
                ranks. False divides them by the number of ranks that still have batches.
            enable: False makes the context do nothing. Default True.
            throw_on_early_termination: Raise on all ranks when the first rank has no more batches.
                Default False.

        Returns:
            A ``torch.distributed.algorithms.Join`` context.

        Raises:
            RuntimeError: At the end of the batches of any rank, with
                ``throw_on_early_termination``.

        Example:
            >>> batches = [inputs] * (2 + dist.get_rank())
            >>> with model.join():
            ...     for batch in batches:
            ...         model(batch).sum().backward()
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook that a rank without further batches runs.

        ``torch.distributed.algorithms.Join`` calls this method.

        Args:
            kwargs: ``divide_by_initial_world_size``, as for :meth:`join`.

        Example:
            >>> from torch.distributed.algorithms import Join
            >>> with Join([model]):
            ...     model(inputs).sum().backward()
        """
        return self._uneven.make_hook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` communicates."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group in which ``Join`` communicates."""
        return self.process_group

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


def _bad_sample_rate(rate: object) -> ValueError:
    return ValueError(
        f"DDP runtime logging sample rate should be equal or greater than 1, but got {rate!r}."
    )
