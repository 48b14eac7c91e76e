"""Trainings whose steps are captured into graphs and replayed, beside the same eager trainings.

The functions run on every rank, on "late" or "cuda". The late device makes no graph: a replay there
is the same step under the rules of a capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from capture_cases import captured
from device_models import batch, layers, loss_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import ReducerDDP

WARM_UP_STEPS = 4  # the buckets do not change after 3 steps
WIDTH = 16
# The parameters after a training: of eager steps, of replayed steps, of the bare module.
States = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A training loop.

    Attributes:
        options: Of the wrapper.
        keep_grads: Gradients are filled with zeros, and not dropped, before a step.
        autocast: Forward and loss run under autocast to bfloat16.
        clip: The norm of all gradients is clipped.
        fused: The optimizer is AdamW, fused and capturable. Otherwise it is SGD.
        unused: The module has a layer that no step uses.
        hook: Gradients are sent in bfloat16 by a communication hook.
        micro_batches: Number of backwards in a step. Only the last one averages.
        sizes: The number of samples in each batch, by step after the first ones.
        one_graph: A graph is dropped before the next capture.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    keep_grads: bool = False
    autocast: bool = False
    clip: bool = False
    fused: bool = False
    unused: bool = False
    hook: bool = False
    micro_batches: int = 1
    sizes: Sequence[int] = (4, 4, 4, 4)
    one_graph: bool = False


VIEW = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
CASES = {
    "default": Case(),
    "view": Case(VIEW),
    "static": Case(STATIC),
    "static view": Case(STATIC | VIEW),
    "batched": Case({"batched_grad_copy": True}),
    "lazy": Case({"lazy_bucket_allocation": True}),
    "kept gradients": Case(keep_grads=True),
    "kept gradients, view": Case(VIEW, keep_grads=True),
    "autocast": Case(autocast=True),
    "mixed precision": Case(
        {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.float32)}
    ),
    "clipping": Case(clip=True),
    "fused optimizer": Case(VIEW, fused=True),
    "accumulation": Case(micro_batches=2),
    "accumulation, view": Case(VIEW, micro_batches=3),
    "another shape": Case(VIEW, sizes=(4, 4, 4, 6, 6, 6, 6), one_graph=True),
    "two graphs in turn": Case(VIEW, sizes=(4, 6, 4, 6, 4, 6, 6, 4)),
    "two graphs, default": Case(sizes=(4, 6, 4, 6, 4, 6, 6, 4)),
    "an unused layer": Case(STATIC, unused=True),
    "hook": Case(hook=True),
    "all": Case(
        VIEW | STATIC, keep_grads=True, autocast=True, clip=True, fused=True, micro_batches=2
    ),
}
# The late device has neither autocast nor fused optimizers.
NOT_ON_LATE = {name for name, case in CASES.items() if case.fused or case.autocast}
# The wrapper computes in other dtypes than the bare module.
NOT_BARE = {"mixed precision", "hook"}


class Network(nn.Module):
    """A few layers, with a buffer that each forward changes."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else None
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.99)
        return self.second(torch.tanh(self.first(x))) * self.scale


class Training:
    """A wrapped module with its optimizer, and the static inputs of its steps."""

    def __init__(self, device: str, case: Case, wrapped: bool = True) -> None:
        self.device, self.case = device, case
        self.module = Network(case.unused).to(device)
        self.model: nn.Module = self.module
        if wrapped:
            wrapper = ReducerDDP(self.module, bucket_cap_mb=0.003, **case.options)
            if case.hook:
                wrapper.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)
            self.model = wrapper
        params = [p for name, p in self.module.named_parameters() if "unused" not in name]
        self._params = params
        if case.fused:
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                params, lr=0.01, fused=True, capturable=True
            )
        else:
            self._optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        self._inputs = {
            size: [torch.zeros(size, WIDTH, device=device) for _ in range(case.micro_batches)]
            for size in set(case.sizes)
        }
        self._graphs: dict[int, Callable[[], None]] = {}

    def load(self, number: int, size: int) -> None:
        """Copies the batches of a step into the static inputs."""
        for part, x in enumerate(self._inputs[size]):
            generator = torch.Generator().manual_seed(100 * number + 10 * part + dist.get_rank())
            x.copy_(torch.randn(size, WIDTH, generator=generator))

    def step(self, size: int) -> None:
        """A whole training step on the static inputs."""
        self._optimizer.zero_grad(set_to_none=not self.case.keep_grads)
        *locals_, last = self._inputs[size]
        for x in locals_:
            with self.model.no_sync() if isinstance(self.model, ReducerDDP) else _nothing():
                self._loss(x).backward()
        self._loss(last).backward()
        if not isinstance(self.model, ReducerDDP):
            average(self._params)
        if self.case.clip:
            nn.utils.clip_grad_norm_(self._params, 0.1)
        self._optimizer.step()

    def replay(self, size: int, stream: torch.Stream) -> None:
        """As :meth:`step`, from a graph. Captures the graph if there is none for this size."""
        if size not in self._graphs:
            if self.case.one_graph:
                self._graphs.clear()
            self._graphs[size] = self._capture(size, stream)
        self._graphs[size]()

    def _capture(self, size: int, stream: torch.Stream) -> Callable[[], None]:
        if self.device == "late":

            def again() -> None:
                with captured("late", stream):
                    self.step(size)

            return again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step(size)
        return graph.replay

    def _loss(self, x: torch.Tensor) -> torch.Tensor:
        autocast: AbstractContextManager[Any] = _nothing()
        if self.case.autocast:
            # The cache of autocast would keep casts that a graph has not computed.
            autocast = torch.autocast(self.device, torch.bfloat16, cache_enabled=False)
        with autocast:
            return self.model(x).float().square().mean()

    def state(self) -> list[torch.Tensor]:
        torch.accelerator.synchronize()
        return [tensor.detach().cpu() for tensor in self.module.state_dict().values()]


def average(params: Sequence[torch.Tensor]) -> None:
    """Replaces gradients by their means over ranks, without ddpx."""
    flat = torch.cat([param.grad.flatten() for param in params if param.grad is not None])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for param, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = grad.view_as(param)


def _nothing() -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def deterministic(device: str) -> Iterator[None]:
    """The bits of CUDA's kernels do not depend on timing. The late device has CPU's kernels."""
    torch.use_deterministic_algorithms(device == "cuda")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def trained(device: str, name: str) -> States:
    """The results of a case: in eager steps, in graphs, with the bare module."""
    case = CASES[name]
    with deterministic(device):
        return (
            _train(device, case),
            _train(device, case, graphs=True),
            _train(device, case, wrapped=False),
        )


def _train(
    device: str, case: Case, graphs: bool = False, wrapped: bool = True
) -> list[torch.Tensor]:
    stream = torch.Stream(device=device)
    known: set[int] = set()  # sizes that an eager step has had, so that libraries are ready
    with stream:
        training = Training(device, case, wrapped)
        for number, size in enumerate([*[case.sizes[0]] * WARM_UP_STEPS, *case.sizes]):
            training.load(number, size)
            if graphs and number >= WARM_UP_STEPS and size in known:
                training.replay(size, stream)
            else:
                training.step(size)
            known.add(size)
        return training.state()


def trained_with_graphed_module(**options: Any) -> States:
    """On CUDA: ``make_graphed_callables`` before wrapping, and eager steps of the wrapper.

    Gradients of a graph arrive in another order. Each has a bucket of its own, since NCCL adds the
    values of three ranks in an order that depends on their place in a bucket.
    """

    def train(graphed: bool, wrapped: bool = True) -> list[torch.Tensor]:
        module = layers("cuda")
        if graphed:
            torch.cuda.make_graphed_callables(module, (batch("cuda", 0),))
        model = ReducerDDP(module, bucket_cap_mb=0.0005, **options) if wrapped else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, batch("cuda", step)).backward()
            if not wrapped:
                average(list(module.parameters()))
            optimizer.step()
        return [param.detach().cpu() for param in module.parameters()]

    with deterministic("cuda"):
        return train(graphed=False), train(graphed=True), train(graphed=False, wrapped=False)
