"""``ReducerDDP``: data parallelism over a module, with ddpx's own reducer."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.nn.parameter import UninitializedParameter

from ddpx import errors, health, params, settings
from ddpx.comm import state_sync
from ddpx.comm.process_group import resolve_group
from ddpx.ddp import agreement, nested, placement
from ddpx.ddp.dynamo import active_wrapper
from ddpx.ddp.grad_access import GradAccess
from ddpx.ddp.join import UnevenInputs
from ddpx.ddp.logging_data import logging_data
from ddpx.ddp.mixed_precision import MixedPrecision, check_config
from ddpx.ddp.options import make_options
from ddpx.ddp.private_names import DDPNames
from ddpx.ddp.structure import Structure
from ddpx.params import ownership
from ddpx.params.delayed import check_delayed, with_delayed
from ddpx.params.dtensors import check_dtensors
from ddpx.params.grad_dtypes import GradDtypes
from ddpx.reducer import Reducer
from ddpx.timeline.environment import record_if_asked

# Before torch 2.12 the C++ reducer cannot tell that a stream is captured.
_CAPTURE_IS_HIDDEN = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)

# What _attach() makes anew in a copy.
_MADE_BY_ATTACH = (
    *("reducer", "_successor", "_structure", "_managed_params", "_precision", "_grad_dtypes"),
)


class ReducerDDP(GradAccess, DDPNames, UnevenInputs):
    """Averages the gradients of ``module`` over all ranks while backward runs.

    The first 20 arguments are those of ``torch.nn.parallel.DistributedDataParallel`` (DDP) of
    torch 2.13, in the same order. ``isinstance(model, DistributedDataParallel)`` is true. On CPU
    with ``gloo``, results equal those of DDP bit for bit.

    A backward averages gradients, unless the backward or the forward of each output that the
    backward reaches runs in :meth:`no_sync`.

    Parameters and buffers may be DTensors over another dimension of the mesh. ``param.grad`` is
    then a DTensor in the parameter's placements.

    Args:
        module: The model. All its parameters are on devices of one type. The type is the same on
            every rank.
        device_ids: A list with the device of the module, if the module is on one accelerator. The
            wrapper then moves inputs to this device. None, the default, for all other modules.
        output_device: The device of outputs, if the module is on one accelerator. The wrapper
            stores this argument for compatibility with DDP.
        dim: The batch dimension. Only 0 is supported.
        broadcast_buffers: The older form of ``forward_sync_buffers``. This form also decides
            whether construction broadcasts buffers.
        init_sync: Compare the parameters of all ranks at construction, and broadcast the state of
            rank 0. Default True.
        process_group: The ranks to average over. Default: the default process group.
        bucket_cap_mb: The size of a bucket in MiB. Default: 25, with a first bucket of 1 MiB.
        find_unused_parameters: Allow parameters without a gradient in some steps. If no rank uses
            a parameter in a step, ``param.grad`` does not change. Default False.
        check_reduction: No effect, as in DDP.
        gradient_as_bucket_view: Place ``param.grad`` in the bucket. This saves a copy, and memory
            of the size of the gradients. Default False.
        static_graph: Promise that every step uses the same parameters, each the same number of
            times. Default False.
        delay_all_reduce_named_params: A list of (name, parameter) pairs. These parameters are
            averaged together, when the gradient of ``param_to_hook_all_reduce`` is ready. Steps
            may leave these parameters unused.
        param_to_hook_all_reduce: The parameter that the delayed parameters wait for.
        mixed_precision: An object with ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``. The
            module computes in ``param_dtype``. Gradients are summed in ``reduce_dtype``.
            Parameters and gradients keep their dtypes. Excludes a communication hook.
        device_mesh: A mesh of one dimension, in place of ``process_group``. The mesh may be part
            of a larger mesh.
        skip_all_reduce_unused_params: With ``find_unused_parameters``: do not communicate a bucket
            if no rank used its parameters in the last step. Default False.
        bucket_cap_mb_list: The size in MiB of each bucket in turn. Further buckets have the last
            size. Default None.
        batched_grad_copy: Copy and divide all gradients of a bucket together, when the bucket is
            full. Default False.
        forward_sync_buffers: Broadcast the buffers of rank 0 before each forward. Default True.
        reduce_dtype: The dtype in which floating-point gradients are summed over ranks, for
            example ``torch.float32`` for a 16-bit model. If this dtype is wider than the
            gradient's, sums over micro-steps in ``no_sync`` have it, too. ``param.grad`` is
            rounded to the parameter's dtype once, after the sum. Not in DDP.
        grad_dtype: The dtype of ``param.grad``, as ``Tensor.grad_dtype`` of torch. Default: the
            parameter's dtype. ``torch.float32`` avoids the last rounding, too. Also the dtype of
            sums, unless ``reduce_dtype`` is given. The optimizer must accept such gradients. Not
            in DDP.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a wrong value.
        RuntimeError: No parameter requires a gradient, or parameters differ between ranks. In
            ``backward()``: a parameter got no gradient, and neither ``find_unused_parameters`` nor
            ``static_graph`` is set; or communication failed.

    Example:
        >>> model = ddpx.ReducerDDP(module)
        >>> model(inputs).sum().backward()
        >>> module.weight.grad
        tensor([[16., 16., 16., 16.]])
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
        reduce_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if not isinstance(module, nn.Module):
            raise errors.not_a_module(module)
        if not isinstance(dim, int):
            raise errors.bad_dim(dim)
        check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        if mixed_precision is not None:
            check_config(mixed_precision)
            if reduce_dtype is not None or grad_dtype is not None:
                raise errors.dtypes_and_mixed_precision()
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
            reduce_dtype=reduce_dtype,
            grad_dtype=grad_dtype,
        )
        self.process_group = resolve_group(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.parameters_to_ignore = params.ignored_names(module)
        managed = params.managed_params(module, self.parameters_to_ignore)
        _check_trainable(module, managed)
        check_dtensors(module, self.parameters_to_ignore, self.process_group)
        self._delayed = (delay_all_reduce_named_params, param_to_hook_all_reduce)
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
        self.batched_grad_copy = self._options.batched_grad_copy
        self.skip_all_reduce_unused_params = self._options.skip_all_reduce_unused_params
        self.bucket_bytes_cap = self._options.cap_bytes
        self.forward_sync_buffers = self._options.sync_buffers_at_forward
        # DDP skips the broadcast of buffers after a forward that was not synchronised.
        self.require_forward_param_sync = True
        self.bucket_bytes_cap_list = list(self._options.listed_cap_bytes)
        self.broadcast_bucket_size = state_sync.BROADCAST_BYTES
        self.logger = None  # DDP's is an object of torch's C++ core, over torch's reducer
        self._assign_modules_buffers()
        self._post_sync_hooks = OrderedDict()  # not a dict: its handles refer to it weakly
        self._post_backward_futures = []

        self.mixed_precision = mixed_precision
        if self._options.init_sync:
            self._make_ranks_agree(managed[0].tensor.device)
        self._attach(managed)
        if self._options.init_sync:
            self.reducer.number_as_constructed()
        record_if_asked(self, agreed=self._options.init_sync)

    def _make_ranks_agree(self, device: torch.device) -> None:
        state = params.module_state(
            self.module, self.parameters_to_ignore, self._options.sync_buffers_at_init
        )
        description = self._describe()
        with health.constructing(self.process_group):
            differences = agreement.differences(description, self.process_group, device)
            if not differences:
                state_sync.broadcast(state, self.process_group)
        if differences:
            raise errors.ranks_disagree(differences)

    def _describe(self) -> agreement.Description:
        delayed, gate = self._delayed
        names = {param: name for name, param in self.module.named_parameters()}
        config = self.mixed_precision
        extra = {
            "delay_all_reduce_named_params": [name for name, _ in delayed or ()],
            "param_to_hook_all_reduce": None if gate is None else names.get(gate),
            "mixed_precision": config
            and (config.param_dtype, config.reduce_dtype, config.buffer_dtype),
        }
        ignored = self.parameters_to_ignore
        return agreement.describe(self.module, ignored, self._options, extra)

    def _attach(self, managed: Sequence[params.ManagedParam]) -> None:
        """Starts to average the gradients of ``managed``."""
        ownership.claim(self, managed)
        bystanders = params.frozen_params(self.module, self.parameters_to_ignore)
        self._managed_params = list(managed)
        self._structure = Structure(self.module, self.parameters_to_ignore)
        self._successor: weakref.ref[ownership.Wrapper] | None = None
        self._first_forward = True
        self._grad_dtypes = GradDtypes(
            managed,
            self._options.reduce_dtype,
            self._options.grad_dtype,
            getattr(self.mixed_precision, "param_dtype", None),
        )
        marked, gate = with_delayed(managed, *self._delayed)
        older: Reducer | None = self.__dict__.get("reducer")
        self.reducer = Reducer(marked, bystanders, self.process_group, self._options, gate)
        if older is not None:
            self.reducer.continue_from(older)
        if settings.switch_of("DDPX_CHECK_FINITE"):
            self.set_check_finite()
        self._precision = None
        if self.mixed_precision is not None:
            self._precision = MixedPrecision(
                self.module, self.mixed_precision, self.parameters_to_ignore
            )
            if self._precision.reduce_dtype is not None:
                self._reduce_in(self._precision.reduce_dtype, self._precision.param_dtype)
        self._first_buckets = self.reducer.plan.buckets

    def _managed(self) -> Sequence[params.ManagedParam]:
        return self._managed_params if self._successor is None else []

    def _yield_to(self, successor: ownership.Wrapper) -> None:
        """A newer wrapper averages the parameters: this one only runs the module meanwhile."""
        self._remove_autograd_hooks()
        self._successor = weakref.ref(successor)

    def _has_yielded(self) -> bool:
        if self._successor is None:
            return False
        if self._successor() is None:  # the newer wrapper is gone
            self._attach(params.managed_params(self.module, self.parameters_to_ignore))
        return self._successor is not None

    # ---- training ------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module on this rank's inputs, as ``model(*inputs, **kwargs)``.

        The forward first broadcasts the buffers of rank 0, if ``forward_sync_buffers`` is set. If
        ``device_ids`` is given, the forward moves tensors in the inputs to this device.

        Args:
            inputs: Positional arguments of the module.
            kwargs: Keyword arguments of the module.

        Returns:
            The output of the module.

        Raises:
            RuntimeError: A parameter of the module was replaced after wrapping, and no output
                requires a gradient. Otherwise the backward raises this error.
            RankFailure: A rank was lost, or communication failed.

        Example:
            >>> model(inputs).shape
            torch.Size([8, 1])
        """
        if self._has_yielded():
            return self.module(*inputs, **kwargs)
        records_graph = torch.is_grad_enabled()
        replaced: list[str] = []
        if records_graph and not self._lowered() and not self._structure.unchanged():
            replaced = self._structure.replaced()
            records_graph = not (replaced or self._structure.has_plain_tensors())
        self._before_forward(records_graph)
        if self.device_ids:
            inputs = nested.to_device(inputs, self.device)
            kwargs = nested.to_device(kwargs, self.device)
        output = self._run_module(inputs, kwargs)
        self._sync_buffers_at(_BufferCommHookLocation.POST_FORWARD)
        if records_graph:
            self.reducer.watch_outputs(list(nested.tensors_in(output)))
        elif replaced:
            self._refuse_at_backward(replaced, output)
        self.require_forward_param_sync = records_graph and self.require_backward_grad_sync
        return output

    def _lowered(self) -> bool:
        """Whether casts stand in the place of parameters, as in a forward within a backward."""
        return self._precision is not None and self._precision.lowered

    def _run_module(self, inputs: Any, kwargs: Any) -> Any:
        if self._precision is None:
            with active_wrapper(self):
                return self.module(*inputs, **kwargs)
        with active_wrapper(self), self._precision.forward() as outputs:
            output = self.module(
                *self._precision.cast_inputs(inputs), **self._precision.cast_inputs(kwargs)
            )
            outputs += nested.tensors_in(output)
        return output

    def _refuse_at_backward(self, replaced: list[str], output: Any) -> None:
        """Raises when a backward through ``output`` begins, if ``replaced`` still holds then.

        ``torch.func.functional_call`` puts parameters of the caller in place during a forward only.
        """

        def check(_: torch.Tensor) -> None:
            if self._structure.replaced():
                raise errors.params_replaced(replaced)

        outputs = [tensor for tensor in nested.tensors_in(output) if tensor.requires_grad]
        if not outputs:  # hidden in an object of another type: the last chance to tell
            raise errors.params_replaced(replaced)
        for tensor in outputs:
            tensor.register_hook(check)

    def _before_forward(self, records_graph: bool) -> None:
        if _CAPTURE_IS_HIDDEN and records_graph and self.require_backward_grad_sync:
            self._check_capture()
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

    def _check_capture(self) -> None:
        if self.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.reducer.refuse_capture()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward averages gradients. Assignment is allowed, as in DDP."""
        return self.reducer.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.sync_enabled = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients local if forward, backward or both run in this context.

        Local gradients add up in ``param.grad``. The next backward that averages gradients
        averages the sum. A local micro-step communicates no gradients. The page
        docs/gradient_accumulation.md has the exact rule, and a comparison with DDP.

        Returns:
            A context manager.

        Example:
            >>> with model.no_sync():
            ...     model(inputs).sum().backward()
            >>> model.module.weight.grad
            tensor([[8., 8., 8., 8.]])
            >>> model(inputs).sum().backward()  # averages the sum of both backwards
            >>> model.module.weight.grad
            tensor([[32., 32., 32., 32.]])
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- a look inside -------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Arguments, buckets and times of the last sampled step, under DDP's names."""
        return logging_data(self)

    # ---- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group is not dist.group.WORLD:
            raise errors.not_default_group()
        state = copy.copy(self.__dict__)
        for name in _MADE_BY_ATTACH:
            del state[name]
        del state["process_group"]
        state["require_backward_grad_sync"] = self.require_backward_grad_sync
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        sync = state.pop("require_backward_grad_sync")
        super().__setstate__(state)
        self.process_group = resolve_group(None)
        self._attach(params.managed_params(self.module, self.parameters_to_ignore))
        record_if_asked(self, agreed=False)  # a copy may be made on some ranks only
        self.require_backward_grad_sync = sync
        if self._post_sync_hooks:
            self._call_after_sync()


# isinstance(model, DistributedDataParallel) holds, without inheriting a line of it: libraries ask.
DistributedDataParallel.register(ReducerDDP)


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
