"""A fault that one rank alone finds at construction is the same error on all ranks, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import BucketPlan, ReducerDDP

DEADLINE_S = 5.0
_ODD = 1  # the rank that has the fault


def _net(**kwargs: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, **kwargs), nn.Linear(4, 4))


class _WithBuffer(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("state", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _frozen() -> Any:
    return ReducerDDP(_net().requires_grad_(False))


def _with_sync_batch_norm() -> Any:
    return ReducerDDP(nn.Sequential(*_net(), nn.SyncBatchNorm(4)))


def _with_sparse_param() -> Any:
    module = _net()
    module[0].weight = nn.Parameter(torch.eye(4).to_sparse())
    return ReducerDDP(module)


def _with_compressed_param() -> Any:
    module = _net()
    module[0].weight = nn.Parameter(torch.eye(4).to_sparse_csr())
    return ReducerDDP(module)


class _NotDescribed(torch.Tensor):
    """A subclass that raises when it is looked at."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("only the library may call this")


def _with_strange_buffer() -> Any:
    return ReducerDDP(_WithBuffer(torch.ones(2).as_subclass(_NotDescribed)))


class _HiddenParams(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("the file of the weights is gone")


def _with_a_second_wrapper() -> Any:
    module = _net()
    other = nn.ModuleList([module[0], nn.Linear(4, 4)])
    kept = ReducerDDP(other, init_sync=False)
    model = ReducerDDP(module)
    return model, kept


def _with_delayed_stranger() -> Any:
    module, stranger = _net(), nn.Parameter(torch.ones(1))
    return ReducerDDP(
        module,
        delay_all_reduce_named_params=[("far", stranger)],
        param_to_hook_all_reduce=module[0].weight,
    )


def _with_delayed(module: nn.Module, delayed: nn.Parameter) -> Any:
    return ReducerDDP(
        module,
        delay_all_reduce_named_params=[("0.weight", delayed)],
        param_to_hook_all_reduce=module[1].weight,
    )


def _with_inner_node() -> Any:
    module = _net()
    module[0]._parameters["weight"] = module[0].weight * 1
    return ReducerDDP(module)


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing to train": (_frozen, "parameter that requires a gradient"),
    "no module": (lambda: ReducerDDP(_net), "wraps a torch.nn.Module"),
    "lazy parameter": (lambda: ReducerDDP(nn.LazyLinear(4)), "uninitialized parameters"),
    "lazy buffer": (
        lambda: ReducerDDP(nn.Sequential(*_net(), nn.LazyBatchNorm1d(affine=False))),
        "uninitialized",
    ),
    "two types of devices": (
        lambda: ReducerDDP(nn.Sequential(*_net(), nn.Linear(4, 4, device="meta"))),
        "same type of devices",
    ),
    "meta device": (
        lambda: ReducerDDP(_net(device="meta")[:1]),
        "2 parameters: 0.weight, 0.bias, on the meta device",
    ),
    "SyncBatchNorm": (_with_sync_batch_norm, "SyncBatchNorm layers"),
    "sparse parameter": (_with_sparse_param, "0.weight"),
    "compressed parameter": (_with_compressed_param, "0.weight"),
    "strange buffer": (_with_strange_buffer, "only the library may call this"),
    "parameters that raise": (
        lambda: ReducerDDP(_HiddenParams(4, 4)),
        "OSError: the file of the weights is gone",
    ),
    "sparse gradients": (
        lambda: ReducerDDP(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))),
        "sparse",
    ),
    "option": (lambda: ReducerDDP(_net(), bucket_cap_mb="25"), "bucket_cap_mb='25'"),
    "flag": (lambda: ReducerDDP(_net(), static_graph="yes"), "static_graph must be True or False"),
    "mixed precision": (
        lambda: ReducerDDP(_net(), mixed_precision=_MixedPrecision(torch.int8)),
        "mixed_precision",
    ),
    "unknown argument": (
        lambda: ReducerDDP(_net(), bucket_size=25),  # type: ignore[call-arg]
        "unexpected keyword argument 'bucket_size'",
    ),
    "too many arguments": (
        lambda: ReducerDDP(_net(), *[None] * 4, True, *[None] * 16),  # type: ignore[arg-type]
        "positional arguments",
    ),
    "missing module": (lambda: ReducerDDP(), "'module'"),  # type: ignore[call-arg]
    "device_ids": (lambda: ReducerDDP(_net(), device_ids=[0]), "device_ids"),
    "delayed parameter": (_with_delayed_stranger, "'far'"),
    "stranger with the name of a parameter": (
        lambda: _with_delayed(_net(), nn.Parameter(torch.ones(1))),
        "names '0.weight', but the module has no parameter",
    ),
    "bucket plan": (
        lambda: ReducerDDP(_net(), bucket_plan=BucketPlan((("far",),), (4,))),
        "the model does not average 'far'",
    ),
    "second wrapper": (_with_a_second_wrapper, "another ReducerDDP of ModuleList already averages"),
    "no leaf": (_with_inner_node, "autograd leaf"),
}


def _make_without_fault(name: str) -> Any:
    """What the other rank makes: the same, without the fault."""
    module = _net()
    if name == "sparse gradients":
        return ReducerDDP(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)))
    if name == "stranger with the name of a parameter":
        return _with_delayed(module, module[0].weight)
    return ReducerDDP(module)


def _check(name: str) -> str:
    fault, _ = FAULTS[name]
    begin = time.monotonic()
    with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError)) as caught:
        if dist.get_rank() == _ODD:
            fault()
        else:
            _make_without_fault(name)
    assert time.monotonic() - begin < DEADLINE_S
    if name != "sparse gradients":  # a difference, which is not raised by one rank
        # The traceback of the rank with the fault shows where the fault is.
        assert (caught.value.__cause__ is not None) == (dist.get_rank() == _ODD)
    model = ReducerDDP(_net())
    model(torch.ones(1, 4) * dist.get_rank()).sum().backward()
    assert torch.equal(model.module[1].bias.grad, torch.ones(4))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_raise_the_same_error(ranks, name):
    texts = ranks(2).run(_check, name, timeout=30)
    assert len(set(texts)) == 1, texts
    assert f"rank {_ODD}" in texts[0]
    assert FAULTS[name][1] in texts[0]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("no module", "TypeError"),
        ("meta device", "ValueError"),
        ("nothing to train", "RuntimeError"),
        ("parameters that raise", "RuntimeError"),
    ],
)
def test_all_ranks_raise_the_kind_of_the_fault(ranks, name, kind):
    for text in ranks(2).run(_check, name, timeout=30):
        assert text.startswith(f"{kind}: ")


def _check_on_all_ranks(name: str) -> str:
    fault, words = FAULTS[name]
    with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError)) as caught:
        fault()
    assert words in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["nothing to train", "lazy buffer", "flag", "SyncBatchNorm", "meta device"]
)
def test_a_fault_of_all_ranks_names_no_rank(ranks, name):
    (text,) = set(ranks(2).run(_check_on_all_ranks, name))
    assert "rank" not in text


def _check_two_faults() -> None:
    names = ["option", "flag"]
    fault, words = FAULTS[names[dist.get_rank()]]
    with pytest.raises((TypeError, ValueError)) as caught:
        fault()
    assert words in str(caught.value)
    assert "rank" not in str(caught.value)


def test_each_rank_raises_its_own_fault_if_all_have_one(ranks):
    ranks(2).run(_check_two_faults, timeout=30)


def _check_meta_without_comparison() -> None:
    with pytest.raises(ValueError, match=r"0\.weight.*on the meta device.*to_empty\(\)"):
        ReducerDDP(_net(device="meta")[:1], init_sync=False)


def test_a_module_on_meta_is_refused_without_comparison(ranks):
    ranks(2).run(_check_meta_without_comparison)


def _check_without_comparison(*args: Any, **options: Any) -> None:
    """The rank raises at once, and its peer has a wrapper."""
    if dist.get_rank() == _ODD:
        with pytest.raises(RuntimeError, match="doesn't have any parameter"):
            ReducerDDP(_net().requires_grad_(False), *args, **options)
    else:
        ReducerDDP(_net(), *args, **options)


def test_without_init_sync_no_rank_waits(ranks):
    ranks(2).run(_check_without_comparison, init_sync=False, timeout=30)
    ranks(2).run(_check_without_comparison, None, None, 0, None, False, timeout=30)
