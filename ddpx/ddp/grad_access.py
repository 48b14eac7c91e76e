"""Access to averaged gradients beyond DDP, delegated to the parts of a wrapper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddpx import errors
from ddpx.ddp.ddp_interface import DDPInterface
from ddpx.ddp.post_sync import PostSyncHook
from ddpx.ddp.synchronized_grads import average_grads


class GradAccess(DDPInterface):
    """The methods of ``ReducerDDP`` that DDP does not have."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Sets whether backwards from now on average gradients.

        The name is that of FSDP2. ``no_sync()`` does the same for a block.

        Args:
            requires_gradient_sync: True to average gradients, False to keep them local.

        Example:
            >>> model.set_requires_gradient_sync(False)
            >>> model(inputs).sum().backward()
            >>> model.module.weight.grad  # of this rank alone
            tensor([[8., 8., 8., 8.]])
        """
        self.require_backward_grad_sync = requires_gradient_sync

    def reset(self) -> None:
        """Prepares the wrapper for a new step after a step that failed.

        After an error in ``backward()`` the wrapper does this by itself. A training loop needs the
        call if the loop caught an error outside ``backward()``. After the call, the next forward
        does not report parameters that the last backward left without a gradient. Between complete
        steps the call has no effect.

        Raises:
            RuntimeError: A backward is running.

        Example:
            >>> loss = model(inputs).sum()
            >>> del loss  # this step has no backward
            >>> model.reset()
            >>> model(inputs).sum().backward()
        """
        self.reducer.reset()

    def set_check_finite(self, enabled: bool = True) -> None:
        """Sets whether ``backward()`` raises if a gradient has NaN or infinity.

        The check is off by default. If one rank has such a gradient, all ranks of the process
        group raise. The error names the step, the rank and the parameter.

        The setting must be the same on all ranks. The check reads every gradient, and adds an
        all-reduce of a few bytes to each step. ``DDPX_CHECK_FINITE=1`` turns the check on without
        a change of the script. Do not combine the check with a gradient scaler: a scaler expects
        such steps and skips them.

        Args:
            enabled: True to turn the check on, False to turn it off. Default True.

        Raises:
            TypeError: ``enabled`` is not a bool.
            RuntimeError: A backward is running.

        Example:
            >>> model.set_check_finite()
            >>> (model(inputs) * float("inf")).sum().backward()
            Traceback (most recent call last):
                ...
            RuntimeError: ...
        """
        if not isinstance(enabled, bool):
            raise errors.not_a_flag("enabled", enabled)
        self.reducer.set_check_finite(enabled)

    def extra_repr(self) -> str:
        """Returns the line of ``repr()`` that describes the wrapper.

        Example:
            >>> model
            ReducerDDP(
              rank 0 of 2, 2 parameters in 1 bucket
              (module): Linear(in_features=4, out_features=1, bias=True)
            )
        """
        group, buckets = self.process_group, self.reducer.plan.buckets
        return (
            f"rank {group.rank()} of {group.size()}, "
            f"{errors.count(sum(map(len, buckets)), 'parameter')} in "
            f"{errors.count(len(buckets), 'bucket')}"
        )

    def register_post_sync_hook(
        self, param_or_module: torch.Tensor | nn.Module, fn: PostSyncHook
    ) -> RemovableHandle:
        """Calls ``fn(param)`` after each synchronized backward, when ``param.grad`` is averaged.

        An exception of ``fn`` reaches the caller of ``backward()``.

        Args:
            param_or_module: A parameter, or a module. For a module, the wrapper calls ``fn`` for
                each parameter of the module that the wrapper averages.
            fn: The hook. The return value is ignored.

        Returns:
            A handle. ``handle.remove()`` removes the hook.

        Raises:
            ValueError: This wrapper averages none of the parameters.

        Example:
            >>> def print_norm(param):
            ...     print(f"{param.grad.norm():.1f}")
            >>> handle = model.register_post_sync_hook(model.module.weight, print_norm)
            >>> model(inputs).sum().backward()
            32.0
            >>> handle.remove()
        """
        return self._post_sync.register(self.reducer, self._managed(), param_or_module, fn)

    def synchronized_grads(
        self,
        loss: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        *,
        retain_graph: bool = False,
        allow_unused: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """Computes ``torch.autograd.grad(loss, tensors)`` and averages the result over ranks.

        Every rank calls this method with the same number of tensors, of the same shapes.
        ``param.grad`` does not change.

        Args:
            loss: A scalar tensor.
            tensors: Parameters, or other tensors of the graph.
            retain_graph: Keep the graph for another backward. Default False.
            allow_unused: Allow tensors that the loss does not depend on. Default False.

        Returns:
            A gradient for each tensor, in the tensor's shape. A rank that did not use a tensor
            contributes zeros. The gradient is None if no rank used the tensor.

        Raises:
            RuntimeError: The loss does not depend on a tensor, and ``allow_unused`` is False.

        Example:
            >>> loss = model(inputs).sum()
            >>> model.synchronized_grads(loss, [model.module.weight])
            (tensor([[16., 16., 16., 16.]]),)
        """
        tensors = tuple(tensors)
        syncs, self.reducer.sync_enabled = self.reducer.sync_enabled, False
        try:
            grads = torch.autograd.grad(
                loss, tensors, retain_graph=retain_graph, allow_unused=allow_unused
            )
        finally:
            self.reducer.sync_enabled = syncs
        return average_grads(
            grads, tensors, loss.device, self.process_group, self._options.reduce_dtype
        )
