"""DDP's names for the synchronization of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpx.comm.process_group import resolve_group
from ddpx.ddp.backward_hooks import optimizers
from ddpx.ddp.backward_hooks.communication import check_hook
from ddpx.ddp.interface.finalization import Finalization
from ddpx.ddp.interface.join import JoinInterface
from ddpx.ddp.search import wrapper_search
from ddpx.params.dtensors import check_dtensors


class GradientInterface(JoinInterface, Finalization):
    """Attributes and methods of DDP that concern gradients."""

    device_type: str
    gradient_as_bucket_view: bool
    static_graph: bool
    device_ids: list[int] | None
    output_device: int | None
    is_multi_device_module: bool
    find_unused_parameters: bool
    bucket_bytes_cap: int
    device_mesh: Any
    _lazy_init_ran: bool

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
            TypeError: The hook is not callable, or not with two arguments.
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
        wrapper_search.exclude(self._ddpx, "register_comm_hook()")
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
        wrapper_search.exclude(self._ddpx, "_register_builtin_comm_hook()")
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
            RuntimeError: The script has registered a class with torch for ``optim``, and the class
                does not support DDP.
            ValueError: torch has no functional form of ``optim``; parameters are DTensors;
                ``reduce_dtype`` or ``grad_dtype`` is set; or the average is not the mean.
        """
        optimizers.register_fused(self, self._ddpx.options, optim, args, kwargs, optim_params)
        self._ddpx.comm_hook.runs_optimizer = True

    def _lazy_init(self) -> None:
        """The first forward calls this method. User code may set up optimizers until then."""
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    def _setup_in_backward_optimizers(self) -> None:
        """Makes optimizers of ``_apply_optimizer_in_backward()`` run on averaged gradients."""
        if optimizers.take_over(self, self._ddpx.options):
            self._ddpx.comm_hook.runs_optimizer = True

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[nn.Parameter | tuple[str, nn.Parameter]]:
        """Yields the parameters that a wrapper of ``module`` does not ignore."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets are in arrival order. torch's hooks for ZeRO optimizers read this."""
        return bool(self.reducer.arrival_order)

    @_has_rebuilt_buckets.setter
    def _has_rebuilt_buckets(self, value: bool) -> None:
        """Has no effect: the reducer knows. Code of DDP's forward assigns this attribute."""

    @property
    def _static_graph_delay_allreduce_enqueued(self) -> bool:
        """Whether a backward has averaged gradients. Cached losses of sentence-transformers let the
        first backward of a static graph average, because DDP fails otherwise."""
        return self.reducer.num_steps > 0

    @_static_graph_delay_allreduce_enqueued.setter
    def _static_graph_delay_allreduce_enqueued(self, value: bool) -> None:
        """Has no effect: the reducer knows."""

    def _set_static_graph(self) -> None:
        """Has the effect of ``static_graph=True``. Allowed before the first averaged backward."""
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again. This call of "
                "_set_static_graph() has no effect. Leave out the call.",
                stacklevel=2,
            )
            return
        self.reducer.set_static_graph()
        self.static_graph = True
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so "
                "find_unused_parameters=True has no effect. Leave out this argument. The unused "
                "parameters must be the same in all steps.",
                stacklevel=2,
            )

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
        if new_process_group is None:
            raise TypeError(
                "new_process_group must be a torch.distributed.ProcessGroup, but got None. Make a "
                "group with torch.distributed.new_group(...)."
            )
        resolve_group(new_process_group)  # raises if the group was destroyed
        replica = self._ddpx
        replica.comm_hook.check_group_can_change(replica.group, new_process_group)
        check_dtensors(self.module, self.parameters_to_ignore, new_process_group)
        replica.reducer.move_to(new_process_group)
        replica.group = new_process_group
        replica.transport = None  # lets the former group's transport end
        replica.search = wrapper_search.begin(replica)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measures the times of the first ten steps, and then of every ``sample_rate``-th step."""
        if sample_rate < 1:
            raise ValueError(
                "DDP runtime logging sample rate should be equal or greater than 1, but got "
                f"{sample_rate!r}."
            )
        self.reducer.set_sample_rate(sample_rate)
