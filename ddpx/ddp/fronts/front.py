"""The steps of a forward, for a wrapper and for the hooks of ``ddpx.replicate``.

A class derived from ``ReducerDDP`` may override each of the methods, or call it. All methods and
attributes but ``_ddpx`` have names of DDP, so that names of such a class collide with DDP's names
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ddpx import errors, params
from ddpx.comm import state_sync
from ddpx.ddp.arguments.placement import Placement
from ddpx.ddp.fronts.dynamo import ActiveWrapper
from ddpx.ddp.interface.gradients import GradientInterface
from ddpx.ddp.interface.logging_data import Logger, logging_data
from ddpx.ddp.replica import ownership
from ddpx.ddp.replica.averaging import Averaging
from ddpx.ddp.replica.replica import Replica
from ddpx.ddp.user_module import nested
from ddpx.version import release_of

# Before torch 2.12 the C++ reducer cannot tell that a stream is captured.
_CAPTURE_IS_HIDDEN = release_of(torch.__version__) < (2, 12)
ATTRIBUTE = "_ddpx"  # a front has its replica under this name, and nothing else of ddpx


class Front(GradientInterface):
    """A front of a :class:`Replica`, which it owns as its attribute ``_ddpx``."""

    # ---- forward -------------------------------------------------------------------------------

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Prepares a forward before the module runs. Returns the inputs of the module."""
        replica = self._ddpx
        averaging = replica.averaging
        reducer = averaging.reducer
        records_graph = torch.is_grad_enabled()
        if averaging.may_have_yielded:
            if replica.is_part_of_another():
                return inputs, kwargs
            if records_graph:
                averaging.take_back(ownership.take(replica))
        if not self._lazy_init_ran:
            self._lazy_init()
        captured = _CAPTURE_IS_HIDDEN and reducer.is_captured
        joins = self._join_config.enable
        if joins:
            if replica.uneven.depends_on_other_ranks:
                reducer.check_join_capture(captured)
            replica.uneven.begin_forward(self)
        if records_graph:
            if replica.search is None:
                reducer.prepare_forward(captured)
            else:
                replica.search.prepare_forward(replica, captured)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
            if records_graph:
                reducer.begin_forward()
        if joins:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            inputs = nested.to_device(inputs, self.device)
            kwargs = nested.to_device(kwargs, self.device)
        if averaging.precision is not None:
            inputs = averaging.precision.cast_inputs(inputs)
            kwargs = averaging.precision.cast_inputs(kwargs)
        return inputs, kwargs

    def _inside_ddp_forward(self) -> AbstractContextManager[None]:
        """A context in which this front is the active wrapper, as for torch.compile."""
        return ActiveWrapper(self)

    def _post_forward(self, output: Any) -> Any:
        """Completes a forward after the module has run. Returns the output of the forward."""
        replica = self._ddpx
        averaging = replica.averaging
        if averaging.may_have_yielded and replica.is_part_of_another():
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        records_graph = torch.is_grad_enabled()
        if records_graph:
            _watch(averaging, self.module, output)
        # The next forward else skips the broadcast of buffers, as in DDP. Not an assignment, which
        # takes 1 us for an attribute of a module.
        synchronized = records_graph and averaging.reducer.sync_enabled
        self.__dict__["require_forward_param_sync"] = synchronized
        return output

    # ---- construction --------------------------------------------------------------------------

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Checks that the layers of ``module`` work on its device. The constructor calls this.

        Raises:
            ValueError: A module on the CPU has SyncBatchNorm layers.
        """
        names = [
            name or "the module itself"
            for name, layer in module.named_modules()
            if isinstance(layer, nn.SyncBatchNorm)
        ]
        if names and self.device_type == "cpu":
            raise ValueError(
                "SyncBatchNorm layers only work with GPU modules, but this module is on CPU and "
                f"has {errors.count_names(names, 'SyncBatchNorm layer')}. Move the module to an "
                "accelerator before wrapping, or do not call convert_sync_batchnorm() on CPU."
            )

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

    # ---- reports -------------------------------------------------------------------------------

    @property
    def logger(self) -> Logger:
        """Logging data, under the names of DDP's logger."""
        return Logger(self)

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Arguments, buckets and times of the last sampled step, under DDP's names."""
        return logging_data(self)


def set_attributes(front: Front, replica: Replica, place: Placement, device_mesh: Any) -> None:
    """Sets the attributes of DDP that the steps, trainers and scripts written for DDP read."""
    options = replica.options
    front._ddpx = replica
    front.parameters_to_ignore = set(replica.ignored)
    front.mixed_precision = options.mixed_precision
    if device_mesh is not None:
        front.device_mesh = device_mesh
    front.device = place.device
    front.device_type = place.device.type
    front.is_multi_device_module = place.is_multi_device
    front.device_ids = place.device_ids
    front.output_device = place.output_device
    front.find_unused_parameters = options.find_unused_parameters
    front.gradient_as_bucket_view = options.gradient_as_bucket_view
    front.static_graph = False  # until _set_static_graph(), as in DDP
    front.bucket_bytes_cap = options.cap_bytes
    front.broadcast_bucket_size = state_sync.BROADCAST_BYTES
    front.forward_sync_buffers = options.sync_buffers_at_forward
    front.require_forward_param_sync = True
    front.modules_buffers, front.named_module_buffers = [], {}  # until _assign_modules_buffers()
    front.buffer_hook = None
    front._lazy_init_ran = False


def _watch(averaging: Averaging, module: nn.Module, output: Any) -> None:
    """Lets the reducer see the backward of ``output``, which ``module`` has computed."""
    structure = averaging.structure
    outputs = list(nested.tensors_in(output))
    precision = averaging.precision
    # Casts replace params in a forward within a backward.
    if (precision is not None and precision.lowered) or structure.unchanged(module):
        averaging.reducer.watch_outputs(outputs)
        return
    all_replaced = structure.all_replaced(module)
    averaging.reducer.watch_outputs(outputs, all_replaced)
    replaced = structure.replaced(module)
    if replaced:
        structure.refuse_backward(module, replaced, outputs)
    elif not all_replaced and not structure.remembers(module):
        structure.remember(module)
