"""What ``reduce_dtype`` and ``grad_dtype`` refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import ReducerDDP

FLOAT32 = torch.float32


def _module() -> nn.Module:
    return nn.Linear(6, 3, dtype=torch.bfloat16)


def _check_optimizers_in_backward() -> None:
    for dtypes in ({"reduce_dtype": FLOAT32}, {"grad_dtype": FLOAT32}):
        model = ReducerDDP(_module(), **dtypes)
        with pytest.raises(ValueError, match=r"_register_fused_optim.* does not work with reduce"):
            model._register_fused_optim(torch.optim.Adam)
        net = _module()
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        model = ReducerDDP(net, **dtypes)
        with pytest.raises(ValueError, match=r"_apply_optimizer_in_backward.* does not work with"):
            model(torch.randn(5, 6, dtype=torch.bfloat16))


def test_optimizers_in_backward_are_refused(ranks):
    ranks(2).run(_check_optimizers_in_backward)


def _check_arguments() -> None:
    for narrow in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match=r"grad_dtype=torch\.\w+ cannot hold .*: wide\."):
            ReducerDDP(nn.ParameterDict({"wide": torch.ones(3)}), grad_dtype=narrow)
    for name in ("reduce_dtype", "grad_dtype"):
        for value in ("float32", torch.int32, 32):
            with pytest.raises(TypeError, match=f"{name} must be a floating-point torch.dtype"):
                ReducerDDP(_module(), **{name: value})
        for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
            with pytest.raises(ValueError, match=rf"{name}=torch\.float8_\w+ cannot be used"):
                ReducerDDP(_module(), **{name: narrow})
    with pytest.raises(ValueError, match="mixed_precision has a reduce_dtype of its own"):
        ReducerDDP(
            _module(),
            mixed_precision=_MixedPrecision(torch.float16),
            reduce_dtype=torch.float32,
        )


def test_arguments(ranks):
    ranks(2).run(_check_arguments)


def _check_grad_dtype_of_a_script() -> None:
    """Averages in the dtype of the parameter would lose digits of wide gradients."""
    for dtypes in ({}, {"reduce_dtype": FLOAT32}):
        module = _module()
        module.weight.grad_dtype = FLOAT32
        with pytest.raises(
            ValueError, match=r"has set grad_dtype of .*: weight\. Pass grad_dtype="
        ):
            ReducerDDP(module, **dtypes)
    ReducerDDP(module, grad_dtype=FLOAT32)
    module = _module()
    older = ReducerDDP(module, grad_dtype=FLOAT32)
    newer = ReducerDDP(module)  # the grad_dtype of the parameters is that of the older wrapper
    newer(torch.ones(1, 6, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad.dtype is torch.bfloat16
    del older


def test_a_grad_dtype_of_the_script_is_refused(ranks):
    ranks(1).run(_check_grad_dtype_of_a_script)
    ranks(2).run(_check_grad_dtype_of_a_script)
