"""DDP's names for manual finalization: the script says when a step waits for its buckets."""

from __future__ import annotations

from typing import Any

from ddpx import settings
from ddpx.ddp.replica.replica import Replica


class Finalization:
    """Attributes and methods of DDP (torch 2.15) that concern manual finalization.

    ddpx has these names with every torch.
    """

    mixed_precision: Any
    _ddpx: Replica

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether :meth:`finalize_backward` ends each step, instead of the end of ``backward()``.

        The script sets this property before a forward, or after a step has ended. Default False.
        The value must be the same on all ranks. A copy of the wrapper keeps the value.

        ``backward()`` then launches the reduction of all gradients and returns without a wait.
        Until the script calls :meth:`finalize_backward`, gradients are not averaged, and a further
        forward that records a graph, or a further backward, is an error. The script may run other
        work and other collective calls meanwhile. It must not change ``param.grad``: a schedule of
        ``torch.distributed.pipelining`` needs ``scale_grads=False``, and gradients are clipped or
        unscaled later. Torch does not count the changes of ``GradScaler.unscale_()`` and of
        ``param.grad.data``, so these raise no error.

        Raises:
            TypeError: On assignment: the value is no truth value.
            RuntimeError: On assignment: a forward has run, and its step has not ended. Or all
                parameters are in ``delay_all_reduce_named_params``.

        Example:
            >>> model.require_manual_backward_finalization = True
            >>> model(inputs).sum().backward()
            >>> model.finalize_backward()
            >>> model.module.weight.grad
            tensor([[16., 16., 16., 16.]])
        """
        return self._ddpx.reducer.settings.manual_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        required = settings.flag("require_manual_backward_finalization", required)
        if required:
            self._check_manual_backward_finalization_supported()
        self._ddpx.reducer.set_manual_finalization(required)

    @property
    def _require_manual_backward_finalization(self) -> bool:
        """The attribute of DDP that holds the property."""
        return self.require_manual_backward_finalization

    def _check_manual_backward_finalization_supported(self) -> None:
        """Raises RuntimeError if the reduction of all parameters is delayed, as in DDP."""
        if self._ddpx.reducer.delays_all_params:
            raise RuntimeError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params. Leave require_manual_backward_finalization at "
                "False."
            )

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` must come after ``backward()`` has returned.

        The answer is for the next backward of the last forward. False allows a call in a hook of
        this backward as well, after the last gradient. True in the first synchronized step, which
        launches its buckets at the end of backward; until buckets were rebuilt; and with
        ``mixed_precision``. False without :attr:`require_manual_backward_finalization`.

        Example:
            >>> model.require_manual_backward_finalization = True
            >>> loss = model(inputs).sum()
            >>> model.should_finalize_after_backward  # the first step
            True
            >>> loss.backward()
            >>> model.finalize_backward()
        """
        if not self.require_manual_backward_finalization:
            return False
        return (
            self.mixed_precision is not None or self._ddpx.reducer._should_finalize_after_backward()
        )

    def finalize_backward(self) -> None:
        """Waits for the gradients of the step, and writes the averages to ``param.grad``.

        The script calls this method once for each synchronized backward: after ``backward()``, or
        in a hook of this backward if all gradients have come and
        :attr:`should_finalize_after_backward` is False. Ranks may call it at different places
        between collective calls of the script. Post-sync hooks run in this call.

        Raises:
            RuntimeError: :attr:`require_manual_backward_finalization` is False. Or gradients are
                missing in the backward that runs: the call has no effect then, and may be
                repeated. Or no reduction is pending, as after a backward in :meth:`no_sync`, a
                backward that raised, or another call in the same step. Or the script has changed
                ``param.grad`` since the backward, or what ``backward()`` raises without manual
                finalization: this call then has ended the step.

        Example:
            >>> model.require_manual_backward_finalization = True
            >>> model(inputs).sum().backward()
            >>> model.finalize_backward()
            >>> model.module.weight.grad
            tensor([[16., 16., 16., 16.]])
        """
        self._check_manual_backward_finalization_supported()
        self._ddpx.reducer._finalize_backward_manual()
