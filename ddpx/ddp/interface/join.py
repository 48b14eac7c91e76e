"""DDP's names for uneven inputs.

The hook of a join context is made of these methods. A derived class may override each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddpx import health, params, settings
from ddpx.comm import state_sync
from ddpx.comm.collectives import all_reduce
from ddpx.ddp.interface.buffers import BufferInterface


class _Join(Join):
    """Names lost ranks if one of its calls fails."""

    _process_group: dist.ProcessGroup
    _device: torch.device

    def __exit__(self, *raised: Any) -> None:
        with health.between_steps(self._process_group):
            super().__exit__(*raised)

    def _get_num_nonjoined_procs(self) -> int:
        """The number of ranks that have batches. In torch's class, this wait misses lost ranks."""
        number = all_reduce(torch.zeros(1, device=self._device), self._process_group)
        return int(number.item())


class JoinInterface(BufferInterface, Joinable):
    """Attributes and methods of DDP that concern uneven inputs."""

    module: nn.Module
    parameters_to_ignore: set[str]
    _authoritative_rank: int  # the rank whose model all ranks have after a join context

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
            TypeError: A flag is no truth value.
            RuntimeError: At the end of the batches of any rank, with
                ``throw_on_early_termination``.
            RankFailure: A rank was lost.

        Example:
            >>> batches = [inputs] * (2 + dist.get_rank())
            >>> with model.join():
            ...     for batch in batches:
            ...         model(batch).sum().backward()
        """
        return _Join(
            [self],
            settings.flag("enable", enable),
            settings.flag("throw_on_early_termination", throw_on_early_termination),
            divide_by_initial_world_size=settings.flag(
                "divide_by_initial_world_size", divide_by_initial_world_size
            ),
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
        if self._ddpx.search is not None:
            self._ddpx.search.suspend()
        return self._ddpx.uneven.make_hook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` communicates."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group in which ``Join`` communicates."""
        return self.process_group

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """Announces to ranks without batches whether the next backward of this rank averages.

        A collective call, at each forward in a join context.

        Args:
            is_joined_rank: This rank has no more batches.

        Returns:
            On a rank without batches: whether the next backward of the other ranks averages.
        """
        if is_joined_rank:
            return self._ddpx.uneven.receive_step(self.process_group, self.device)
        self._ddpx.uneven.announce_step(self.reducer, self.device)
        return None

    def _check_and_sync_module_buffers(self) -> None:
        """On a rank without batches: takes part in the synchronization of buffers."""
        if self._check_sync_bufs_pre_fwd():
            with health.waiting_for_buffers(self.reducer.monitor), torch.no_grad():
                source = self._find_common_rank(self._distributed_rank, False)
                self._sync_module_buffers(source)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Gives all ranks the model of the last rank that had batches."""
        source = self._find_common_rank(self._distributed_rank, is_last_joiner)
        self._authoritative_rank = source
        state = params.module_state(
            self.module, self.parameters_to_ignore, self.forward_sync_buffers
        )
        state_sync.broadcast(state, self.process_group, source)
