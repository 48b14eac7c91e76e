"""The parity matrix: models with step functions, modes, and bucket caps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ddpx_poison import ddp_poisoned
from parity_models import (
    Adversaries,
    Branches,
    ConvBatchNorm,
    LazyGrads,
    MixedDtypes,
    Mlp,
    OddParams,
    SparseEmbeddings,
    TiedEmbeddings,
    Transformer,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import Comparison, compare_traces, record_training

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "find unused view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
_ALL_CAPS: dict[str, dict[str, Any]] = {
    "caps left out": {},
    "tiny caps": {"bucket_cap_mb": 0.001},
    "medium caps": {"bucket_cap_mb": 0.03},
    "huge caps": {"bucket_cap_mb": 10_000},
    "listed caps": {"bucket_cap_mb_list": [0.001, 0.03, 1]},
}
# DDP of an older torch has no list of caps to compare with. See test_plan_against_ddp.py.
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
CAPS = {name: caps for name, caps in _ALL_CAPS.items() if caps.keys() <= _DDP_ARGUMENTS.keys()}


def _features(model: nn.Module, number: int) -> None:
    model(torch.randn(6, 24)).square().mean().backward()


def _images(model: nn.Module, number: int) -> None:
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()


def _tokens(model: nn.Module, number: int) -> None:
    logits = model(torch.randint(50, (3, 7)))
    targets = torch.randint(50, (3 * 7,))
    nn.functional.cross_entropy(logits.flatten(0, 1), targets).backward()


def _accumulate(model: nn.Module, number: int) -> None:
    """Three micro-batches, of which the last one synchronizes. The first step has one.

    With static_graph, DDP fails an assertion if the very first backward is not synchronized.
    """
    for micro_batch in range(3) if number else (2,):
        with model.no_sync() if micro_batch < 2 else nullcontext():
            model(torch.randn(6, 24)).square().mean().backward()


def _alternate_sync(model: nn.Module, number: int) -> None:
    """Synchronizes every second step by the attribute, and begins without."""
    model.require_backward_grad_sync = number % 2 == 1
    model(torch.randn(6, 24)).square().mean().backward()


def _branch_by_rank_and_step(model: nn.Module, number: int) -> None:
    use_left = (dist.get_rank() + number) % 2 == 0 if number % 3 else True
    model(torch.randn(6, 24), use_left).square().mean().backward()


def _branch_by_rank(model: nn.Module, number: int) -> None:
    model(torch.randn(6, 24), dist.get_rank() == 0).square().mean().backward()


def _branch_accumulated(model: nn.Module, number: int) -> None:
    with model.no_sync():
        model(torch.randn(6, 24), number % 2 == 0).square().mean().backward()
    model(torch.randn(6, 24), dist.get_rank() == 0).square().mean().backward()


def _adversarial(models: nn.Module, number: int) -> None:
    fake = models["generator"](torch.randn(6, 8))
    real = torch.randn(6, 24)
    loss = models["discriminator"](fake).square().mean()
    loss = loss + (models["discriminator"](real) - 1).square().mean()
    loss.backward()


def _double_features(model: nn.Module, number: int) -> None:
    model(torch.randn(6, 24, dtype=torch.float64)).square().mean().backward()


def _bf16_features(model: nn.Module, number: int) -> None:
    model(torch.randn(6, 24, dtype=torch.bfloat16)).square().mean().backward()


def _complex_features(model: nn.Module, number: int) -> None:
    model(torch.randn(6, 24, dtype=torch.complex64)).abs().mean().backward()


def _channels_last_images(model: nn.Module, number: int) -> None:
    images = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    model(images).square().mean().backward()


def _channels_last() -> nn.Module:
    return ConvBatchNorm().to(memory_format=torch.channels_last)


def _plain_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def _wrap_each_child(wrapper: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def wrap(module: nn.Module, **options: Any) -> nn.Module:
        return nn.ModuleDict({name: wrapper(c, **options) for name, c in module.named_children()})

    return wrap


@dataclass(frozen=True)
class Case:
    """A training to run under both wrappers.

    ``modes`` has the keys of MODES for which it is suited.
    """

    name: str
    build: Callable[[], nn.Module]
    step: Callable[[nn.Module, int], None]
    modes: tuple[str, ...] = tuple(MODES)
    training: dict[str, Any] = field(default_factory=dict)
    wrap_each_child: bool = False


_UNUSED = ("find unused", "find unused view")
_STATIC = ("static", "static view")

SPARSE = "sparse embedding"

CASES = (
    Case("MLP", Mlp, _features),
    Case("MLP, fp64", lambda: Mlp(torch.float64), _double_features),
    Case("MLP, bf16", lambda: Mlp(torch.bfloat16), _bf16_features),
    Case("MLP, complex", lambda: Mlp(torch.complex64), _complex_features),
    Case("MLP, Adam", Mlp, _features, training={"make_optimizer": _adam}),
    Case("conv + BatchNorm", ConvBatchNorm, _images),
    Case("channels last", _channels_last, _channels_last_images),
    Case("transformer", Transformer, _tokens),
    Case("tied embeddings", TiedEmbeddings, _tokens),
    Case("zero-size, 0-d, strided, frozen", OddParams, _features),
    Case("lazy gradients", LazyGrads, _features),
    Case("lazy gradients, kept", LazyGrads, _features, training={"set_to_none": None}),
    Case("lazy gradients, zeroed", LazyGrads, _features, training={"set_to_none": False}),
    Case("fp32 and fp64 mixed", MixedDtypes, _features),
    Case(SPARSE, SparseEmbeddings, _tokens, training={"make_optimizer": _plain_sgd}),
    Case("accumulation with no_sync", Mlp, _accumulate),
    # Begins without synchronization, for which DDP fails an assertion in a static graph.
    Case(
        "sync every second step",
        Mlp,
        _alternate_sync,
        ("default", "view", *_UNUSED),
        training={"num_steps": 8},
    ),
    Case("kept gradients", Mlp, _features, training={"set_to_none": None}),
    Case("zeroed gradients", Mlp, _features, training={"set_to_none": False}),
    Case("two wrappers, one backward", Adversaries, _adversarial, wrap_each_child=True),
    Case("unused per rank and step", Branches, _branch_by_rank_and_step, _UNUSED),
    Case("unused per rank", Branches, _branch_by_rank, (*_UNUSED, *_STATIC)),
    Case(
        "unused per rank, kept gradients",
        Branches,
        _branch_by_rank_and_step,
        _UNUSED,
        training={"set_to_none": None},
    ),
    Case("unused in some micro-batches", Branches, _branch_accumulated, _UNUSED),
)
CASES_BY_NAME = {case.name: case for case in CASES}


_ONE_THREAD = "gloo_one_thread"


@functools.cache
def _one_thread_gloo() -> dist.ProcessGroup:
    """All ranks. Sparse sums of two gloo threads may corrupt memory (docs/divergences.md)."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> dist.Backend:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._threads, options._timeout = 1, timeout
        return dist.ProcessGroupGloo(store, rank, size, options)

    dist.Backend.register_backend(_ONE_THREAD, make, devices=["cpu"])
    return dist.new_group(backend=_ONE_THREAD)


def _gloo_for(case_name: str, device: str) -> dist.ProcessGroup | None:
    """The group of a training whose buckets are calls of the group. None: the default group."""
    return _one_thread_gloo() if case_name == SPARSE and device == "cpu" else None


# Where the buckets of ReducerDDP move: a gloo group, shared memory beside the group, a shm group.
TRANSPORTS = ("gloo", "shm beside gloo", "shm")


@functools.cache
def _shm_group() -> dist.ProcessGroup:
    """All ranks. Cached, since the group is created collectively."""
    return dist.new_group(backend="shm")


def compare_case(
    case_name: str, mode: str, device: str = "cpu", transport: str = "shm beside gloo"
) -> dict[str, Comparison]:
    """Runs on every rank: one case in one mode with all caps, under DDP and ReducerDDP.

    DDP uses a gloo group on CPU. ``transport`` is one of :data:`TRANSPORTS`.
    """
    options: dict[str, Any] = {
        "gloo": {"transport": "group", "process_group": _gloo_for(case_name, device)},
        "shm beside gloo": {},
        "shm": {},
    }[transport]
    if transport == "shm":
        options = {"process_group": _shm_group()}
    return compare_wrapper(functools.partial(ReducerDDP, **options), case_name, mode, device)


def compare_wrapper(
    own_wrapper: Callable[..., nn.Module], case_name: str, mode: str, device: str = "cpu"
) -> dict[str, Comparison]:
    """Like compare_case, with any wrapper. DDP's parts raise while ``own_wrapper`` trains."""
    torch.backends.cudnn.deterministic = True
    case = CASES_BY_NAME[case_name]
    reference = functools.partial(
        DistributedDataParallel, process_group=_gloo_for(case_name, device)
    )
    comparisons = {}
    for caps_name, caps in CAPS.items():
        traces = []
        for wrapper, environment in (
            (reference, nullcontext),
            (own_wrapper, ddp_poisoned),
        ):
            wrap = _wrap_each_child(wrapper) if case.wrap_each_child else wrapper
            with environment(), torch.device(device):
                trace = record_training(
                    case.build,
                    lambda module, wrap=wrap, caps=caps: wrap(module, **MODES[mode], **caps),
                    case.step,
                    **case.training,
                )
            traces.append(trace)
        comparisons[caps_name] = compare_traces(*traces)
    return comparisons
