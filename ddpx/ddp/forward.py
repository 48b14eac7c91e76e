"""The forward of a wrapper, in the steps that DDP has.

A derived class may override each of the methods with DDP's names, or call it.
"""

from __future__ import annotations

from typing import Any

import torch

from ddpx import health
from ddpx.ddp import nested, ownership
from ddpx.ddp.averaging import Averaging
from ddpx.ddp.ddp_interface import DDPInterface

# Before torch 2.12 the C++ reducer cannot tell that a stream is captured.
_CAPTURE_IS_HIDDEN = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)


class Forward(DDPInterface):
    """The methods of ``ReducerDDP`` that run in a forward."""

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
        running = ownership.forwards.running
        running.append(self._ddpx)
        module_runs = False
        try:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            module_runs = True
            output = _run(self, inputs, kwargs)
            module_runs = False
            return self._post_forward(output)
        except Exception as error:
            health.note_fault(self._ddpx.reducer.monitor, error, module_runs)
            raise
        finally:
            running.pop()

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What a forward does before the module runs. Returns the inputs of the module."""
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
        captured = _CAPTURE_IS_HIDDEN and _is_captured(self)
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

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        """What a forward does after the module has run. Returns the output of the forward."""
        replica = self._ddpx
        averaging = replica.averaging
        if averaging.may_have_yielded and replica.is_part_of_another():
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        records_graph = torch.is_grad_enabled()
        if records_graph:
            _watch(averaging, output)
        # Not require_forward_param_sync, because an assignment to a module's attribute takes 1 us.
        replica.buffers.last_forward_was_synchronized = (
            records_graph and averaging.reducer.sync_enabled
        )
        return output


def _is_captured(wrapper: Forward) -> bool:
    return wrapper.device_type == "cuda" and torch.cuda.is_current_stream_capturing()


def _run(wrapper: Forward, inputs: Any, kwargs: Any) -> Any:
    """Runs the module, with cast parameters if ``mixed_precision`` is set."""
    replica = wrapper._ddpx
    precision = replica.averaging.precision
    if precision is None or replica.is_part_of_another():
        return wrapper._run_ddp_forward(*inputs, **kwargs)
    with precision.forward() as outputs:
        output = wrapper._run_ddp_forward(*inputs, **kwargs)
        outputs += nested.tensors_in(output)
    return output


def _watch(averaging: Averaging, output: Any) -> None:
    """Lets the reducer see the backward of ``output``."""
    structure = averaging.structure
    outputs = list(nested.tensors_in(output))
    precision = averaging.precision
    # Casts replace params in a forward within a backward.
    if (precision is not None and precision.lowered) or structure.unchanged():
        averaging.reducer.watch_outputs(outputs)
        return
    averaging.reducer.watch_outputs(outputs, structure.all_replaced())
    replaced = structure.replaced()
    if replaced:
        structure.refuse_backward(replaced, outputs)
