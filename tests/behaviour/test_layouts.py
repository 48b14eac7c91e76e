"""Buffers and parameters of any layout and dtype: all ranks get the values of rank 0, and train."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

from ddpx import ReducerDDP
from ddpx.comm import collectives

warnings.filterwarnings("ignore", category=UserWarning)  # these layouts are in beta state

EYE = torch.eye(4)


class _Subclass(torch.Tensor):
    pass


class _Opaque(torch.Tensor):
    """Has no memory at its own address, and does not tell torch where its values are."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        plain = tree_map(lambda each: each.held if isinstance(each, cls) else each, args)
        result = func(*plain, **(kwargs or {}))
        return args[0] if func is torch.ops.aten.copy_.default else result


def _values() -> torch.Tensor:
    """Other values on each rank, at the same places."""
    return EYE * (dist.get_rank() + 2)


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return _values().clone()


def _per_channel() -> torch.Tensor:
    scales = torch.full((4,), 0.5 + dist.get_rank())
    return torch.quantize_per_channel(_values(), scales, torch.zeros(4), 0, torch.qint8)


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([_values()[0], _values()[1, :2]], layout=layout)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "COO": lambda: _values().to_sparse(),
    "CSR": lambda: _values().to_sparse_csr(),
    "CSC": lambda: _values().to_sparse_csc(),
    "BSR": lambda: _values().to_sparse_bsr((2, 2)),
    "BSC": lambda: _values().to_sparse_bsc((2, 2)),
    "nested": lambda: _nested(torch.strided),
    "jagged": lambda: _nested(torch.jagged),
}
DTYPES: dict[str, Callable[[], torch.Tensor]] = {
    "per tensor": lambda: torch.quantize_per_tensor(_values(), 0.1, 0, torch.qint8),
    "per channel": _per_channel,
    "float8": lambda: _values().to(torch.float8_e4m3fn),
    "uint16": lambda: _values().to(torch.uint16),
    "uint16 behind others": lambda: _values().to(torch.uint16)[1:],
    "int16": lambda: _values().to(torch.int16).t(),
    "bool": lambda: _values() > 2 + dist.get_rank(),
}
STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: _values()[0].expand(3, 4),
    "overlapping": lambda: _values()[0].unfold(0, 3, 1),
    "a part": lambda: _values()[:, :2],
    "channels last": lambda: _values().view(1, 2, 2, 4).to(memory_format=torch.channels_last),
    "conjugate": lambda: _values().to(torch.complex64).conj(),
    "negation": lambda: _values().to(torch.complex64).conj().imag,
    "zeros without memory": lambda: torch._efficientzerotensor((4,)),
    "empty": lambda: torch.empty(0),
    "scalar": lambda: _values()[0, 0].clone(),
    "subclass": lambda: _values().as_subclass(_Subclass),
    "inference": _inference,
    "meta": lambda: torch.ones(4, device="meta"),
}
# Subclasses with __torch_dispatch__, as of quantized weights.
WRAPPERS: dict[str, Callable[[], torch.Tensor]] = {
    "wrapper": lambda: TwoTensor(_values(), 2 * _values()),
    "wrapper of float8": lambda: TwoTensor(DTYPES["float8"](), DTYPES["float8"]()),
    "opaque wrapper": lambda: _Opaque(_values()),
}
TENSORS = {**LAYOUTS, **DTYPES, **STRIDED, **WRAPPERS}


class _Net(nn.Module):
    """``state`` is no part of the graph."""

    def __init__(self, state: torch.Tensor, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if kind == "buffer":
            self.register_buffer("state", state)
        else:
            self.state = nn.Parameter(state, requires_grad=kind == "trained")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values, as a tensor that gloo can send."""
    if tensor.is_meta:
        return torch.zeros(1)
    if isinstance(tensor, TwoTensor):
        tensor = torch.cat([tensor.a, tensor.b])
    if isinstance(tensor, _Opaque):
        tensor = tensor.held
    if tensor.is_nested:
        tensor = tensor.values()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.to(torch.float64).contiguous()


def _assert_as_on_rank_0(tensor: torch.Tensor) -> None:
    own = _bytes_of(tensor.detach())
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    assert all(torch.equal(other, others[0]) for other in others), others


def _check(name: str, kind: str, transport: str) -> None:
    model = ReducerDDP(_Net(TENSORS[name](), kind), transport=transport)
    _assert_as_on_rank_0(model.module.state)
    for number in range(3):
        if kind == "buffer":
            made = TENSORS[name]()
            model.module.state = made  # user code may replace a buffer
        model.zero_grad()
        model(torch.full((1, 4), float(dist.get_rank() + number))).sum().backward()
        _assert_as_on_rank_0(model.module.state)
        mean = number + (dist.get_world_size() - 1) / 2
        assert torch.equal(model.module.layer.weight.grad, torch.full((4, 4), mean))


@pytest.mark.parametrize("transport", ["auto", "group"])
@pytest.mark.parametrize("kind", ["buffer", "frozen"])
@pytest.mark.parametrize("name", TENSORS)
def test_all_ranks_get_the_state_of_rank_0(ranks, name, kind, transport):
    if (name, kind) == ("meta", "frozen"):
        pytest.skip("a parameter on another type of device is refused, as by DDP")
    ranks(2).run(_check, name, kind, transport, timeout=30)


def _error_of(make: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        make()
    return str(caught.value)


def _check_trained(name: str) -> None:
    text = _error_of(lambda: ReducerDDP(_Net(LAYOUTS[name](), "trained")))
    assert "1 parameter: state, in a sparse, nested or opaque layout" in text


@pytest.mark.parametrize("name", LAYOUTS)
def test_trained_parameters_that_are_not_dense_are_named(ranks, name):
    ranks(2).run(_check_trained, name, timeout=30)


class _Scaled(nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _check_trained_wrapper(name: str, mode: dict[str, Any]) -> None:
    model = ReducerDDP(_Scaled(TENSORS[name]()), **mode)
    _assert_as_on_rank_0(model.module.scale)
    for number in range(3):
        model.zero_grad()
        x = torch.full((4, 4), float(dist.get_rank() + number))
        model(x).sum().backward()
        grad = model.module.scale.grad
        mean = torch.full((4, 4), number + 0.5)
        parts = (grad.a, grad.b) if isinstance(grad, TwoTensor) else (grad,)
        assert all(torch.equal(part, mean) for part in parts)


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"transport": "group"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["wrapper", "opaque wrapper"])
def test_trained_wrappers_of_tensors(ranks, name, mode):
    ranks(2).run(_check_trained_wrapper, name, mode, timeout=30)


def _check_wrapper_on_one_rank(name: str) -> None:
    state = TENSORS[name]() if dist.get_rank() else _values()
    text = _error_of(lambda: ReducerDDP(_Net(state, "buffer")))
    assert f"class {type(TENSORS[name]()).__name__}" in text


@pytest.mark.parametrize("name", ["wrapper", "opaque wrapper"])
def test_a_wrapper_on_one_rank_only_is_reported(ranks, name):
    ranks(2).run(_check_wrapper_on_one_rank, name, timeout=30)


def _check_opaque() -> None:
    for kind in ("buffer", "frozen"):
        text = _error_of(lambda kind=kind: ReducerDDP(_Net(EYE.to_mkldnn(), kind)))
        assert "'state'" in text
        assert "layout torch._mkldnn" in text
    ReducerDDP(_Net(EYE.to_mkldnn(), "buffer"), broadcast_buffers=False)


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no MKLDNN tensors"
)
def test_opaque_layout_is_named(ranks):
    ranks(2).run(_check_opaque, timeout=30)


def _check_other_places() -> None:
    """The sparse buffer of one rank has one element more."""
    dense = EYE.clone()
    dense[0, 3] = dist.get_rank()
    text = _error_of(lambda: ReducerDDP(_Net(dense.to_sparse_csr(), "buffer")))
    assert "buffer 'state': shape (4, 4), float32, layout sparse_csr of tensors of shapes" in text


def test_other_places_of_elements_are_reported(ranks):
    ranks(2).run(_check_other_places, timeout=30)


def _check_other_scale() -> None:
    """The bytes of rank 0 would mean other values with the scale of rank 1."""
    scale = 0.1 * (1 + dist.get_rank())
    state = torch.quantize_per_tensor(_values(), scale, 0, torch.qint8)
    text = _error_of(lambda: ReducerDDP(_Net(state, "buffer")))
    assert "by 0.1 from 0 on rank 0; " in text
    assert "by 0.2 from 0 on rank 1\n" in text


def test_another_scale_is_reported(ranks):
    ranks(2).run(_check_other_scale, timeout=30)


def _check_lazy_values_of_one_rank(name: str, rank: int) -> None:
    """One rank has its values as a conjugate or a negation, which is applied when they are read."""
    values = torch.full((4,), 2.0 * (1 + dist.get_rank()))
    if name == "conjugate":
        values = values * 1j
    is_lazy = dist.get_rank() == rank
    negate = torch.conj if name == "conjugate" else torch._neg_view
    model = ReducerDDP(_Net(negate(values) if is_lazy else -values, "buffer"))
    assert torch.equal(model.module.state, torch.full((4,), -2j if name == "conjugate" else -2.0))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["conjugate", "negation"])
def test_lazy_values_of_one_rank(ranks, name, rank):
    ranks(2).run(_check_lazy_values_of_one_rank, name, rank)


def test_tensors_that_share_a_broadcast():
    """A broadcast has tensors of one dtype and of at most 8 bytes, or one larger tensor."""
    sizes = [(3, torch.float32), (1, torch.float64), *[(1, torch.float32)] * 5]
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in sizes]
    together = collectives.flattened_together(tensors, 8)
    assert [[each.nbytes for each in group] for group in together] == [
        [12],
        [4, 4],
        [4, 4],
        [4],
        [8],
    ]
