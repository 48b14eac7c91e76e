"""This rank's replica of a module: everything that ddpx keeps for the front of a module."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ddpx import params
from ddpx.comm import transport as transports
from ddpx.comm.ended_group import EndedGroup
from ddpx.ddp.arguments import agreement
from ddpx.ddp.arguments.options import Options
from ddpx.ddp.backward_hooks.communication import CommHook
from ddpx.ddp.backward_hooks.post_sync import PostSync
from ddpx.ddp.replica import ownership
from ddpx.ddp.replica.averaging import Averaging
from ddpx.ddp.replica.uneven_inputs import UnevenInputs
from ddpx.ddp.search import wrapper_search
from ddpx.ddp.user_module.module_ref import ModuleRef
from ddpx.planning.report import PlanReport
from ddpx.reducer import Reducer


class Replica:
    """One rank's copy of a module, whose gradients are averaged over ranks.

    A front owns this object: a wrapper, or the hooks of :func:`ddpx.replicate`.

    Attributes:
        ignored: Names of parameters and buffers that take no part.
        group: The ranks to average over.
        transport: The transport of buckets. None: the group.
        options: The options of the front.
        averaging: The reducer and what belongs to it, after :meth:`attach`.
        comm_hook: The hook in place of the all-reduce.
        post_sync: The hooks that run after a synchronized backward.
        uneven: The state of join contexts.
        search: The search of the best bucket plan, while it measures.
        plan_report: The result of the last search that ended. None without
            ``bucket_cap_mb="auto"``.
        error: The last error outside the reducer, for logging data.
    """

    averaging: Averaging

    def __init__(
        self,
        module: ModuleRef,
        ignored: frozenset[str],
        group: dist.ProcessGroup,
        options: Options,
    ) -> None:
        self._module = module
        self.ignored = ignored
        self.group = group
        self.transport: transports.Transport | None = None
        self.options = options
        self.comm_hook = CommHook()
        self.post_sync = PostSync()
        self.uneven = UnevenInputs()
        self.search: wrapper_search.WrapperSearch | None = None
        self.plan_report: PlanReport | None = None
        self.error: str | None = None

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self._module()

    @property
    def name(self) -> str:
        """The module as errors name it: "ReducerDDP of Net", or "replicated Net"."""
        return self._module.name

    @property
    def way_to_end(self) -> str:
        """The way to end the averaging, for errors."""
        if self._module.keeps:
            return "delete the other wrapper"
        return "call ddpx.unreplicate() with the other module"

    @property
    def reducer(self) -> Reducer:
        """The reducer."""
        return self.averaging.reducer

    @property
    def managed(self) -> Sequence[params.ManagedParam]:
        """The averaged parameters. Empty if construction failed."""
        averaging: Averaging | None = self.__dict__.get("averaging")
        return [] if averaging is None else averaging.managed

    @property
    def param_ids(self) -> frozenset[int]:
        """The ``id()`` of each averaged parameter."""
        averaging: Averaging | None = self.__dict__.get("averaging")
        return frozenset() if averaging is None else averaging.param_ids

    @property
    def device(self) -> torch.device:
        """The device of the first averaged parameter, on which ranks communicate."""
        return self.managed[0].tensor.device

    def agree(self, device: torch.device) -> None:
        """Compares the module and the options of all ranks, and broadcasts the state of rank 0.

        A collective call.

        Args:
            device: The device of tensors that the group can send.

        Raises:
            RuntimeError: Ranks differ.
            ValueError: Ranks cannot use the transport of the options.
        """
        self.transport = agreement.make_ranks_agree(
            self.module,
            self.ignored,
            self.options,
            self.group,
            device,
        )

    def attach(
        self, managed: Sequence[params.ManagedParam], earlier_owners: Sequence[ownership.Owner]
    ) -> None:
        """Starts to average the gradients of ``managed`` in place of ``earlier_owners``."""
        for earlier in earlier_owners:
            earlier.make_room()
        self.averaging = Averaging(
            self._module,
            self.ignored,
            managed,
            self.group,
            self.transport,
            self.options,
        )
        self.reducer.wait_for = self.post_sync.wait_for
        ownership.take(self)
        self.search = wrapper_search.begin(self)
        precision = self.averaging.precision
        if precision is not None and precision.reduce_dtype is not None:
            self.comm_hook.reduce_in(self.reducer, precision.reduce_dtype, precision.param_dtype)

    def move_to(self, group: dist.ProcessGroup, num_steps: int) -> None:
        """Averages over ranks that have the same state, as after construction.

        Args:
            group: The ranks.
            num_steps: The number of steps that these ranks have made.
        """
        for _, param in self.module.named_parameters():
            param.grad = None
        self.transport = transports.of(group)
        self.reducer.move_to(group, self.transport, num_steps)
        self.group = group
        self.search = wrapper_search.begin(self)
        self.post_sync.drop_futures()

    # ---- copies --------------------------------------------------------------------------------

    def without_ranks(self) -> Replica:
        """A copy without a group, a transport and a reducer. It can be pickled."""
        twin = copy.copy(self)
        twin.search = twin.plan_report = None
        for name in ("averaging", "group", "transport"):
            del twin.__dict__[name]
        return twin

    def continue_with(self, group: dist.ProcessGroup) -> None:
        """Completes a copy without ranks, before :meth:`attach`.

        Not all ranks may make a copy, so the copy uses the group for its buckets.
        """
        self.group = group
        self.transport = None
        if self.comm_hook.runs_optimizer:  # on the parameters of the original
            self.comm_hook = CommHook()

    # ---- several replicas of the same parameters -----------------------------------------------

    def is_part_of(self, modules: Collection[nn.Module]) -> bool:
        """Whether the module is one of ``modules``, or was deleted."""
        return self._module.is_deleted or self.module in modules

    def averages(self) -> bool:
        """Whether backwards average the parameters for this replica."""
        return bool(self.managed) and not self.averaging.has_yielded

    def make_room(self) -> None:
        """Another replica is about to average the parameters."""
        if ownership.has_ended(self):
            self.reducer.reset()  # the last step may have no end
            self.group = EndedGroup(self.group)
            self.transport = None
            self.reducer.move_to(self.group)
        self.averaging.make_room()

    def yield_to(self, owner: ownership.Owner) -> None:
        """Another replica averages the parameters now."""
        self.reducer.yield_to(owner.reducer)
        self.averaging.make_room()

    def is_part_of_another(self) -> bool:
        """Whether this forward is a part of the forward, or the backward, of the replica that
        averages now. The module then simply runs."""
        running = ownership.forwards.running
        within_forward = bool(running) and running[0] is not self
        within_backward = torch._C._current_graph_task_id() != -1
        return self.averaging.has_yielded and (within_forward or within_backward)
