"""Errors that DDP has, too, contain the words of DDP that scripts and trainers look for."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_arguments import skip_unless_ddp_takes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

Wrapper = Callable[..., Any]


def _linear() -> nn.Module:
    return nn.Linear(4, 4)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        y = self.third(self.first(x))
        return y + self.second(x) if use_all else y


def _two_types() -> nn.Module:
    return nn.Sequential(_linear(), nn.Linear(4, 4, device="meta"))


def _sync_batch_norm() -> nn.Module:
    return nn.Sequential(_linear(), nn.SyncBatchNorm(4))


def _group_and_mesh(cls: Wrapper) -> None:
    cls(_linear(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,)))


def _mesh_of_two_dims(cls: Wrapper) -> None:
    cls(_linear(), device_mesh=init_device_mesh("cpu", (2, 1)))


def _delayed_alone(cls: Wrapper) -> None:
    cls(_linear(), param_to_hook_all_reduce=nn.Parameter(torch.ones(1)))


def _other_model(cls: Wrapper) -> None:
    cls(nn.Linear(4, 4, bias=dist.get_rank() == 0))


def _unused(cls: Wrapper, **options: Any) -> None:
    model = cls(_Branches(), **options)
    for _ in range(3):
        model(torch.ones(1, 4), use_all=False).sum().backward()


def _backward_within_a_backward(cls: Wrapper) -> None:
    """The inner backward reaches a layer whose gradients have been averaged already."""
    module = nn.Sequential(_linear(), _linear())
    model = cls(module, bucket_cap_mb=1e-5)

    def run(*_: object) -> None:
        with torch.enable_grad():
            module[1](torch.ones(1, 4)).sum().backward()

    for _ in range(2):  # the first backward determines the buckets
        model(torch.ones(1, 4)).sum().backward()
    module[0].register_full_backward_hook(run)
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()


def _static_graph_with_less(cls: Wrapper) -> None:
    model = cls(_Branches(), static_graph=True)
    for number in range(4):
        model(torch.ones(1, 4), use_all=number == 0).sum().backward()


def _static_graph_too_late(cls: Wrapper) -> None:
    model = cls(_linear())
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
    model._set_static_graph()


def _bad_annotation_of_bucket(state: object, bucket: int) -> Any:
    return None


# DDP does not read annotations that are texts, as those of this file.
def _bad_annotation_of_result(state, bucket) -> int:
    return 1


def _no_future(state, bucket):
    return 1


def _hook(hook: Any) -> Callable[[Wrapper], None]:
    def run(cls: Wrapper) -> None:
        model = cls(_linear())
        model.register_comm_hook(None, hook)
        model(torch.ones(1, 4)).sum().backward()

    return run


def _second_hook(cls: Wrapper) -> None:
    model = cls(_linear())
    for _ in range(2):
        model.register_comm_hook(None, allreduce_hook)


def _buffer_hook(cls: Wrapper) -> None:
    try:
        cls(_linear())._register_buffer_comm_hook(None, 1)
    except AssertionError as error:  # DDP's
        raise TypeError(str(error)) from error


def _pickle(cls: Wrapper) -> None:
    torch.save(cls(_linear(), process_group=dist.new_group([0, 1])), io.BytesIO())


def _names(params: Callable[[Any], list[nn.Parameter]]) -> Callable[[Wrapper], None]:
    def run(cls: Wrapper) -> None:
        model = cls(_linear())
        model._build_debug_param_to_name_mapping(params(model))

    return run


CASES: dict[str, Callable[[Wrapper], Any]] = {
    "DistributedDataParallel is not needed when a module doesn't have any parameter that requires "
    "a gradient.": lambda cls: cls(nn.ReLU()),
    "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a "
    "dummy forward pass to correctly initialize the modules": lambda cls: cls(nn.LazyLinear(2)),
    "SyncBatchNorm layers only work with GPU modules": lambda cls: cls(_sync_batch_norm()),
    "device_ids can only be None or contain a single element.": lambda cls: cls(
        _linear(), device_ids=[0, 1]
    ),
    "DistributedDataParallel's input module must be on the same type of devices, but input module "
    "parameters locate in ": lambda cls: cls(_two_types()),
    "DistributedDataParallel device_ids and output_device arguments only work with "
    "single-device/multiple-device GPU modules or CPU modules, but got device_ids [0], "
    "output_device None, and module parameters ": lambda cls: cls(_linear(), device_ids=[0]),
    "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
    "time.": _delayed_alone,
    "Cannot specify both process_group and device_mesh arguments.": _group_and_mesh,
    "Only 1D device mesh is supported, but got ": _mesh_of_two_dims,
    "DDP expects same model across all ranks": _other_model,
    "Expected to have finished reduction in the prior iteration before starting a new one. This "
    "error indicates that your module has parameters that were not used in producing "
    "loss.": _unused,
    "Parameter indices which did not receive grad for rank ": _unused,
    "find_unused_parameters=True": _unused,
    "Expected to mark a variable ready only once.": _backward_within_a_backward,
    " has been marked as ready twice.": _backward_within_a_backward,
    "This error indicates that your training graph has changed in this "
    "iteration": _static_graph_with_less,
    "set_static_graph() should be called before training loop starts": _static_graph_too_late,
    "Communication hook must be callable": _hook(1),
    "Communication hook: bucket annotation should be dist.GradBucket.": _hook(
        _bad_annotation_of_bucket
    ),
    "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]": _hook(
        _bad_annotation_of_result
    ),
    "callback must return a torch.futures.Future object, but got ": _hook(_no_future),
    "register_comm_hook or register_builtin_comm_hook can only be called once.": _second_hook,
    "hook must be callable, got int": _buffer_hook,
    "DDP Pickling/Unpickling are only supported when using DDP with the default process "
    "group.": _pickle,
    "found in module parameters, but not DDP parameters.": _names(lambda model: []),
    "Expected param to name mapping to cover all parameters, but got conflicting lengths: 3 vs "
    "2": _names(lambda model: [*model.module.parameters(), nn.Parameter(torch.ones(1))]),
    "DDP runtime logging sample rate should be equal or greater than 1": lambda cls: cls(
        _linear()
    )._set_ddp_runtime_logging_sample_rate(0),
}


def _error(cls: Wrapper, cause: Callable[[Wrapper], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        cause(cls)
    return caught.value


def _check(words: str) -> None:
    theirs = _error(DistributedDataParallel, CASES[words])
    ours = _error(ReducerDDP, CASES[words])
    assert words in str(theirs), theirs
    assert words in str(ours), ours
    assert isinstance(ours, type(theirs)), (type(ours), type(theirs))


@pytest.mark.parametrize("words", CASES, ids=lambda words: words[:40])
def test_words_of_errors(ranks, words):
    ranks(2).run(_check, words)


# The kind of a warning, and what warns. Filters compare the start of the text.
WARNINGS: dict[str, tuple[type[Warning], Callable[[Wrapper], Any]]] = {
    "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead.": (
        FutureWarning,
        lambda cls: cls(_linear(), broadcast_buffers=False),
    ),
    "Both `broadcast_buffers` and `forward_sync_buffers` were specified.": (
        FutureWarning,
        lambda cls: cls(_linear(), broadcast_buffers=False, forward_sync_buffers=False),
    ),
    "The `check_reduction` argument in `DistributedDataParallel` module is deprecated.": (
        FutureWarning,
        lambda cls: cls(_linear(), check_reduction=True),
    ),
    "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will "
    "detect unused parameters automatically": (
        UserWarning,
        lambda cls: cls(_linear(), find_unused_parameters=True, static_graph=True),
    ),
    "You've set static_graph to be True, no need to set it again.": (
        UserWarning,
        lambda cls: cls(_linear(), static_graph=True)._set_static_graph(),
    ),
}


def _check_warning(words: str) -> None:
    kind, cause = WARNINGS[words]
    for cls in (DistributedDataParallel, ReducerDDP):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cause(cls)
        texts = [str(each.message) for each in caught if each.category is kind]
        assert len(texts) == 1
        assert texts[0].startswith(words)


@pytest.mark.parametrize("words", WARNINGS, ids=lambda words: words[:40])
def test_words_of_warnings(ranks, words):
    if "forward_sync_buffers" in words:
        skip_unless_ddp_takes(["forward_sync_buffers"])
    ranks(2).run(_check_warning, words)
