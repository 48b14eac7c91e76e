"""A gradient reducer in 150 lines, with the bits of torch's DistributedDataParallel (DDP).

One dtype, one device, contiguous parameters. docs/internals.md explains this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

MIB = 1 << 20
Plan = list[list[int]]  # the param indices of each bucket, in launch order


def plan_buckets(params: list[nn.Parameter], order: Iterable[int], caps_mb: list[float]) -> Plan:
    """Assigns param indices to buckets. The param that makes a bucket reach its cap closes it."""
    plan: Plan = [[]]
    num_bytes = 0
    for index in order:
        cap_mb = caps_mb[min(len(plan), len(caps_mb)) - 1]  # the last cap repeats
        plan[-1].append(index)
        num_bytes += params[index].nbytes
        if num_bytes >= int(cap_mb * MIB):
            plan.append([])
            num_bytes = 0
    return [bucket for bucket in plan if bucket]


def unreached_params(outputs: Any, params: list[nn.Parameter]) -> list[int]:
    """Walks the autograd graph from the outputs, to find the params that will get no gradient."""
    nodes = [leaf.grad_fn for leaf in tree_leaves(outputs) if getattr(leaf, "grad_fn", None)]
    seen = set(nodes)
    while nodes:
        new = {node for node, _ in nodes.pop().next_functions if node is not None} - seen
        seen |= new
        nodes.extend(new)
    # Only a grad accumulator, the node that adds to `param.grad`, has a `variable`: its param.
    reached = {id(node.variable) for node in seen if hasattr(node, "variable")}
    return [index for index, param in enumerate(params) if id(param) not in reached]


class ReferenceDDP(nn.Module):
    """Averages gradients over all ranks while backward runs. The arguments are those of DDP."""

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: list[float] | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.find_unused = find_unused_parameters
        self.require_backward_grad_sync = True
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)  # ranks start equal, and stay equal by equal gradients
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.caps_mb = bucket_cap_mb_list or ([bucket_cap_mb] if bucket_cap_mb else [1, 25])
        # DDP starts with a single bucket where it will rebuild and no list asks for a split.
        self.will_rebuild = not find_unused_parameters
        caps_mb = [1e9] if self.will_rebuild and not bucket_cap_mb_list else self.caps_mb
        plan = plan_buckets(self.params, range(len(self.params)), caps_mb)
        self._allocate(plan[::-1])  # backward runs from the last layer to the first
        self.used = torch.zeros(len(self.params), dtype=torch.int32)
        self.unreached: list[int] = []
        self.in_step = False
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda _, index=index: self._on_grad(index))

    def _allocate(self, plan: Plan) -> None:
        """Makes a flat buffer for each bucket, and in the buffer a slot for each gradient."""
        self.plan, self.buffers, self.slots = plan, [], {}
        for indices in plan:
            numels = [self.params[index].numel() for index in indices]
            self.buffers.append(self.params[indices[0]].new_empty(sum(numels)))
            for index, piece in zip(indices, self.buffers[-1].split(numels), strict=True):
                self.slots[index] = piece.view_as(self.params[index])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        outputs = self.module(*inputs, **kwargs)
        if self.find_unused and torch.is_grad_enabled():
            self.unreached = unreached_params(outputs, self.params)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the context, a backward only adds to the gradients of this rank."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _on_grad(self, index: int) -> None:
        """Autograd calls this hook when `param.grad` has its gradient: once in a backward."""
        self.used[index] = 1
        if not self.require_backward_grad_sync:
            return
        if not self.in_step:
            self.in_step = True
            self.packed: list[int] = []  # in order of arrival
            self.works: list[dist.Work] = []  # one for each launched bucket
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
            for unreached in self.unreached:
                self._pack(unreached)
        self._pack(index)

    def _pack(self, index: int) -> None:
        """Scales a gradient into its slot, and launches each bucket that is now due."""
        grad, slot = self.params[index].grad, self.slots[index]
        if grad is None:
            slot.zero_()  # the buckets of the peers have this slot, too
        else:
            torch.mul(grad, 1 / dist.get_world_size(), out=slot)
        self.packed.append(index)
        # Calls of ranks pair up by their order alone, so buckets are launched in plan order.
        while (b := len(self.works)) < len(self.plan) and set(self.plan[b]) <= set(self.packed):
            self.works.append(dist.all_reduce(self.buffers[b], async_op=True))

    def _on_backward_end(self) -> None:
        """Autograd calls this at the end of backward: waits for the sums, and writes them back."""
        missing = sorted(set(range(len(self.params))) - set(self.packed))
        for index in missing:
            self._pack(index)  # now every bucket is launched, as on the peers
        if self.find_unused:
            dist.all_reduce(self.used)  # now the number of ranks that used each param
        for indices, work in zip(self.plan, self.works, strict=True):
            work.wait()
            for index in indices:
                if self.find_unused and self.used[index] == 0:
                    continue  # no rank used the param: its gradient stays as it was
                param, slot = self.params[index], self.slots[index]
                param.grad = slot.clone() if param.grad is None else param.grad.copy_(slot)
        self.used.zero_()
        self.in_step = False
        if self.will_rebuild:  # the order of arrival is known now; all ranks take that of rank 0
            order = torch.tensor(self.packed)
            dist.broadcast(order, 0)
            self._allocate(plan_buckets(self.params, order.tolist(), self.caps_mb))
            self.will_rebuild = False
        if missing and not self.find_unused:
            raise RuntimeError(f"no gradient came for the params with the indices {missing}")
