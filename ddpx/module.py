"""``ReducerDDP``: data parallelism over a module, with ddpx's own reducer."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
from torch.nn.parameter import UninitializedParameter

from ddpx import errors, nested, params, placement, state_sync, wrapped_params
from ddpx.comm_hooks import CommHooks
from ddpx.grad_access import GradAccess
from ddpx.logging_data import logging_data
from ddpx.options import make_options
from ddpx.reducer import Reducer
from ddpx.structure import Structure, inside_functional_call
from ddpx.uneven_inputs import UnevenInputs
from ddpx.unsupported import refuse_arguments, with_unsupported_methods


@with_unsupported_methods
class ReducerDDP(GradAccess, CommHooks, UnevenInputs):
    """Averages the gradients of ``module`` over all ranks while backward runs.

    Takes the place of :class:`torch.nn.parallel.DistributedDataParallel`: same arguments in the
    same order (torch 2.13's), same results to the bit, and ``isinstance`` of it.

    Args:
        module: the model. All parameters on devices of one type, the same on every rank.
        device_ids: for a module on one accelerator, a list with that device, to which inputs are
            then moved; otherwise None.
        output_device: for a module on one accelerator, where outputs lie; kept for DDP's sake.
        dim: batch dimension; only 0.
        broadcast_buffers: older form of ``forward_sync_buffers``, which rules construction as well.
        init_sync: check at construction that parameters agree, and broadcast rank 0's state.
        process_group: ranks to average over; the default group if None.
        bucket_cap_mb: bucket size in MiB; 25 if None, with a first bucket of 1 MiB.
        find_unused_parameters: some parameters may get no gradient in some steps. Where that is so
            on all ranks, ``grad`` stays as it was.
        check_reduction: has no effect, as in DDP.
        gradient_as_bucket_view: let ``grad`` lie in the bucket, which saves a copy and memory.
        static_graph: the set of used parameters, and how often each is used, never changes.
        bucket_cap_mb_list: a size in MiB for each bucket in turn; the last one repeats.
        forward_sync_buffers: broadcast rank 0's buffers at forward; True if None.
        device_mesh: a mesh of one dimension, in place of ``process_group``.
        skip_all_reduce_unused_params: with ``find_unused_parameters``, buckets of which no rank
            used a parameter in the last step are not communicated.
        batched_grad_copy: copy and divide the gradients of a bucket together when it is full.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision: not supported yet.

    Raises:
        NotImplementedError: an argument that is not supported yet, by name.
        TypeError, ValueError: an argument that makes no sense; the text says what to pass.
        RuntimeError: no parameter requires a gradient; parameters differ between ranks.

    In ``backward()``, RuntimeError if a parameter got no gradient (unless
    ``find_unused_parameters`` or ``static_graph`` is set), or if communication failed.

    Whether a backward is synchronised is decided when its first gradient arrives, by
    ``require_backward_grad_sync`` at that moment; DDP decides at forward.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if not isinstance(module, nn.Module):
            raise errors.not_a_module(module)
        refuse_arguments(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
        )
        self._options = make_options(
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            bucket_cap_mb_list=bucket_cap_mb_list,
            forward_sync_buffers=forward_sync_buffers,
            batched_grad_copy=batched_grad_copy,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        self.process_group = _resolve_group(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.parameters_to_ignore = params.ignored_names(module)
        managed = params.managed_params(module, self.parameters_to_ignore)
        _check_trainable(module, managed)
        place = placement.place(module, self.parameters_to_ignore, device_ids, output_device)
        self.device = place.device
        self.device_type = place.device.type
        self.is_multi_device_module = place.is_multi_device
        self.device_ids = place.device_ids
        self.output_device = place.output_device
        self.dim = dim
        self.module = module
        self.find_unused_parameters = self._options.find_unused_parameters
        self.gradient_as_bucket_view = self._options.gradient_as_bucket_view
        self.static_graph = self._options.static_graph
        self.bucket_bytes_cap = self._options.cap_bytes
        self.forward_sync_buffers = self._options.sync_buffers_at_forward
        # DDP skips the broadcast of buffers after a forward that was not synchronised.
        self.require_forward_param_sync = True
        self.bucket_bytes_cap_list = list(self._options.listed_cap_bytes)
        self.broadcast_bucket_size = state_sync.BROADCAST_BYTES
        self.logger = None  # DDP's is an object of torch's C++ core, over torch's reducer
        self._assign_modules_buffers()
        self._post_sync_hooks = {}
        self._post_backward_futures = []

        if self._options.init_sync:
            state_sync.check_params_agree(managed, self.process_group)
            state_sync.broadcast(
                params.module_state(
                    module, self.parameters_to_ignore, self._options.sync_buffers_at_init
                ),
                self.process_group,
            )
        self._attach(managed)

    def _attach(self, managed: Sequence[params.ManagedParam]) -> None:
        """Starts to average the gradients of ``managed``."""
        wrapped_params.claim(self, managed)
        bystanders = params.frozen_params(self.module, self.parameters_to_ignore)
        self._managed_params = list(managed)
        self._structure = Structure(self.module, self.parameters_to_ignore)
        self._successor: weakref.ref[wrapped_params.Wrapper] | None = None
        self._first_forward = True
        self.reducer = Reducer(managed, bystanders, self.process_group, self._options)
        self._first_buckets = self.reducer.plan.buckets

    def _managed(self) -> Sequence[params.ManagedParam]:
        return self._managed_params if self._successor is None else []

    def _yield_to(self, successor: wrapped_params.Wrapper) -> None:
        """A newer wrapper averages the parameters: this one only runs the module meanwhile."""
        self.reducer.remove_hooks()
        self._successor = weakref.ref(successor)

    def _has_yielded(self) -> bool:
        if self._successor is None:
            return False
        if self._successor() is None:  # the newer wrapper is gone
            self._attach(params.managed_params(self.module, self.parameters_to_ignore))
        return self._successor is not None

    # ---- training ------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; see :class:`ReducerDDP` for what happens around it."""
        if self._has_yielded():
            return self.module(*inputs, **kwargs)
        records_graph = torch.is_grad_enabled()
        if records_graph and not self._structure.unchanged():
            records_graph = self._check_structure()
        self._before_forward(records_graph)
        if self.device_ids:
            inputs = nested.to_device(inputs, self.device)
            kwargs = nested.to_device(kwargs, self.device)
        with _active_for_dynamo(self):
            output = self.module(*inputs, **kwargs)
        self._sync_buffers_at(_BufferCommHookLocation.POST_FORWARD)
        if records_graph:
            self.reducer.watch_outputs(list(nested.tensors_in(output)))
        self.require_forward_param_sync = records_graph and self.require_backward_grad_sync
        return output

    def _check_structure(self) -> bool:
        """Whether a backward through the changed module will reach wrapped parameters."""
        if inside_functional_call():
            return False
        replaced = self._structure.replaced()
        if replaced:
            raise errors.params_replaced(replaced)
        return True

    def _before_forward(self, records_graph: bool) -> None:
        if self._first_forward:
            self._first_forward = False
            self._run_optimizers_in_backward()
        if self._join_config.enable:
            self._begin_joined_forward()
        if records_graph:
            self.reducer.prepare_forward()
        self._sync_buffers_at(_BufferCommHookLocation.PRE_FORWARD)
        if self._join_config.enable:
            self._agree_on_sync(has_inputs=True)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward averages gradients. May be set by hand, as in DDP."""
        return self.reducer.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.sync_enabled = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to local gradients; the next backward outside averages the sum.

        It is the backward that has to run inside; where the forward ran makes no difference.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group is not dist.group.WORLD:
            raise errors.not_default_group()
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "_successor", "_structure", "_managed_params"):
            del state[name]
        state["require_backward_grad_sync"] = self.require_backward_grad_sync
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        sync = state.pop("require_backward_grad_sync")
        super().__setstate__(state)
        self.process_group = _resolve_group(None)
        self._attach(params.managed_params(self.module, self.parameters_to_ignore))
        self.require_backward_grad_sync = sync

    # ---- what DDP has besides ------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Marks parameters and buffers, by their full names, to be left alone by a later wrap."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[nn.Parameter | tuple[str, nn.Parameter]]:
        """Parameters, with names if asked for, that a wrap of ``module`` does not leave alone."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    @classmethod
    def _get_active_ddp_module(cls) -> nn.Module | None:
        """The wrapper whose forward runs; Dynamo splits graphs at its buckets."""
        return DistributedDataParallel._active_ddp_module

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int]) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """``inputs`` and ``kwargs`` on a device, each in a tuple of one, as in DDP."""
        device = torch.device(self.device_type, device_id)
        return (nested.to_device(inputs, device),), (nested.to_device(kwargs, device),)

    def _set_static_graph(self) -> None:
        """As ``static_graph=True`` at construction; before the first backward."""
        self.reducer.set_static_graph()
        self.static_graph = True

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Averages over other ranks from here on; the caller sees to it that these agree."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            return
        self.reducer.set_collective(new_process_group)
        self.process_group = new_process_group

    def _remove_autograd_hooks(self) -> None:
        """Takes ddpx's hooks off the parameters; no later backward is synchronised."""
        self.reducer.remove_hooks()

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Arguments, buckets and times of the last sampled step, under DDP's names."""
        return logging_data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measures the first ten steps, then every ``sample_rate``-th."""
        if sample_rate < 1:
            raise errors.bad_sample_rate(sample_rate)
        self.reducer.set_sample_rate(sample_rate)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The averaged parameters, and which of them get sparse gradients."""
        managed = params.managed_params(self.module, self.parameters_to_ignore)
        return [p.tensor for p in managed], [p.expect_sparse for p in managed]

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[nn.Parameter]
    ) -> dict[int, str]:
        """The name of each of ``parameters``, by index."""
        managed = params.managed_params(self.module, self.parameters_to_ignore)
        names = {id(p.tensor): p.name for p in managed}
        given = {id(p) for p in parameters}
        for name in (name for key, name in names.items() if key not in given):
            raise errors.param_not_given(name)
        if len(given) != len(names):
            raise errors.params_not_managed(len(given), len(names))
        return {index: names[id(p)] for index, p in enumerate(parameters)}

    def _check_reducer_finalized(self) -> None:
        """As in DDP; here a backward that did not finish raises by itself."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """DDP's switch for copies of outputs; here outputs are never copied."""


# isinstance(model, DistributedDataParallel) holds, without inheriting a line of it: libraries ask.
DistributedDataParallel.register(ReducerDDP)


@contextmanager
@torch._disable_dynamo(recursive=False)
def _active_for_dynamo(wrapper: ReducerDDP) -> Iterator[None]:
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = wrapper  # type: ignore[assignment]
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = before


def _resolve_group(
    process_group: dist.ProcessGroup | None, device_mesh: Any = None
) -> dist.ProcessGroup:
    if device_mesh is not None:
        if process_group is not None:
            raise errors.group_and_mesh()
        if device_mesh.ndim != 1:
            raise errors.not_a_1d_mesh(device_mesh)
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        if not dist.is_initialized() or dist.group.WORLD is None:
            raise errors.no_process_group()
        return dist.group.WORLD
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise errors.rank_not_in_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise errors.not_a_process_group(process_group)
    return process_group


def _check_trainable(module: nn.Module, managed: Sequence[params.ManagedParam]) -> None:
    if not managed:
        raise errors.nothing_to_train()
    lazy = [p.name for p in managed if isinstance(p.tensor, UninitializedParameter)]
    if lazy:
        raise errors.uninitialized_params(lazy)
    if managed[0].tensor.device.type == "cpu":
        names = [n for n, m in module.named_modules() if isinstance(m, nn.SyncBatchNorm)]
        if names:
            raise errors.sync_batch_norm_on_cpu(names)
