"""The forward of a wrapper, in the steps that DDP has.

A derived class may override each of the methods with DDP's names, or call it.
"""

from __future__ import annotations

from typing import Any

import torch

from ddpx import health
from ddpx.comm.ended_group import EndedGroup
from ddpx.comm.transport import Transport
from ddpx.ddp import nested
from ddpx.ddp.grad_access import GradAccess
from ddpx.params import ownership

# Before torch 2.12 the C++ reducer cannot tell that a stream is captured.
_CAPTURE_IS_HIDDEN = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)


class Forward(GradAccess):
    """The methods of ``ReducerDDP`` that run in a forward."""

    _transport: Transport | None

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
        running.append(self)
        try:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._run(inputs, kwargs)
            return self._post_forward(output)
        except Exception as error:
            health.note_fault(self.reducer.monitor, error)
            raise
        finally:
            running.pop()

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What a forward does before the module runs. Returns the inputs of the module."""
        averaging = self._averaging
        records_graph = torch.is_grad_enabled()
        if averaging.may_have_yielded:
            if self._is_part_of_another():
                return inputs, kwargs
            if records_graph:
                averaging.take_back(ownership.take(self))
        if not self._lazy_init_ran:
            self._lazy_init()
        captured = _CAPTURE_IS_HIDDEN and self._is_captured()
        joins = self._join_config.enable
        if joins:
            if self._uneven.depends_on_other_ranks:
                self.reducer.check_join_capture(captured)
            self._uneven.begin_forward(self)
        if records_graph:
            self.reducer.prepare_forward(captured)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
            if records_graph:
                self.reducer.begin_forward()
        if joins:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            inputs = nested.to_device(inputs, self.device)
            kwargs = nested.to_device(kwargs, self.device)
        if averaging.precision is not None:
            inputs = averaging.precision.cast_inputs(inputs)
            kwargs = averaging.precision.cast_inputs(kwargs)
        return inputs, kwargs

    def _is_captured(self) -> bool:
        return self.device_type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _run(self, inputs: Any, kwargs: Any) -> Any:
        precision = self._averaging.precision
        if precision is None or self._is_part_of_another():
            return self._run_ddp_forward(*inputs, **kwargs)
        with precision.forward() as outputs:
            output = self._run_ddp_forward(*inputs, **kwargs)
            outputs += nested.tensors_in(output)
        return output

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        """What a forward does after the module has run. Returns the output of the forward."""
        if self._averaging.may_have_yielded and self._is_part_of_another():
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        records_graph = torch.is_grad_enabled()
        if records_graph:
            self._watch(output)
        # Not require_forward_param_sync, because an assignment to a module's attribute takes 1 us.
        self._buffer_sync.last_forward_was_synchronized = (
            records_graph and self.reducer.sync_enabled
        )
        return output

    def _watch(self, output: Any) -> None:
        """Lets the reducer see the backward of ``output``."""
        averaging = self._averaging
        structure = averaging.structure
        outputs = list(nested.tensors_in(output))
        if averaging.is_lowered or structure.unchanged():
            self.reducer.watch_outputs(outputs)
            return
        self.reducer.watch_outputs(outputs, structure.all_replaced())
        replaced = structure.replaced()
        if replaced:
            structure.refuse_backward(replaced, outputs)

    # ---- several wrappers of the same parameters -----------------------------------------------

    def _averages(self) -> bool:
        return bool(self._managed()) and not self._averaging.has_yielded

    def _make_room(self) -> None:
        if ownership.has_ended(self):
            self.reducer.reset()  # the last step may have no end
            self.process_group = EndedGroup(self.process_group)
            self._transport = None
            self._averaging.move_to(self.process_group)
        self._averaging.make_room()

    def _yield_to(self, owner: ownership.Wrapper) -> None:
        self.reducer.yield_to(owner.reducer)
        self._averaging.make_room()

    def _is_part_of_another(self) -> bool:
        """Whether this forward is a part of the forward, or the backward, of the wrapper that
        averages now. The module then simply runs."""
        return self._averaging.has_yielded and (
            ownership.forwards.contain_another_than(self) or torch._C._current_graph_task_id() != -1
        )
