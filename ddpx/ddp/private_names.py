"""Methods and static methods that DDP has besides training, under DDP's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ddpx import errors, params
from ddpx.ddp import nested
from ddpx.ddp.comm_hooks import CommHooks
from ddpx.ddp.mixed_precision import MixedPrecision
from ddpx.params.dtensors import check_dtensors
from ddpx.params.grad_dtypes import GradDtypes


class DDPNames(CommHooks):
    """The part of a wrapper that trainers and torch's own code reach for now and then."""

    parameters_to_ignore: frozenset[str]
    device_type: str
    dim: int
    static_graph: bool
    require_forward_param_sync: bool
    _precision: MixedPrecision | None
    _grad_dtypes: GradDtypes
    _post_backward_futures: list[torch.futures.Future[Any]]

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

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets are by arrival order; torch's hooks around ZeRO optimizers ask."""
        return bool(self.reducer.arrival_order)

    def _set_static_graph(self) -> None:
        """As ``static_graph=True`` at construction; before the first backward."""
        self.reducer.set_static_graph()
        self.static_graph = True

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Averages over other ranks from here on; the caller sees to it that these agree."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            return
        self._check_group_can_change()
        check_dtensors(self.module, self.parameters_to_ignore, new_process_group)
        self.reducer.join(new_process_group)
        self.process_group = new_process_group

    def _go_over(self, group: dist.ProcessGroup, num_steps: int) -> None:
        """To ranks that have made so many steps and have the same state, as after wrapping."""
        for param in self.module.parameters():
            param.grad = None
        self.reducer.join(group, num_steps)
        self.process_group = group
        self._first_buckets = self.reducer.plan.buckets
        self._post_backward_futures.clear()
        self.require_forward_param_sync = True

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, torch.Tensor]) -> None:
        """From the next backward on: the rows, by parameter name, in which any rank has entries.

        The sparse gradients of these parameters are then summed as dense blocks of these rows. The
        same ids have to be given on every rank; an entry in another row is an error that names it.
        """
        self.reducer._set_sparse_metadata(global_unique_ids)

    def _remove_autograd_hooks(self) -> None:
        """Takes ddpx's hooks off the parameters; no later backward is synchronised."""
        self.reducer.remove_hooks()
        self._grad_dtypes.reset()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measures the first ten steps, then every ``sample_rate``-th."""
        if sample_rate < 1:
            raise errors.bad_sample_rate(sample_rate)
        self.reducer.set_sample_rate(sample_rate)

    def _managed(self) -> Sequence[params.ManagedParam]:
        raise NotImplementedError

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
