"""Values for calls of bindings: valid values by annotation, and invalid values of every kind."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from hypothesis import strategies as st
from one_thread_gloo import OneThreadGloo

from ddpx import _C


@dataclass(frozen=True)
class Drawn:
    """A value, and its text in a report."""

    value: Any
    text: str


def literal(value: object) -> Drawn:
    return Drawn(value, repr(value))


HUGE = 2**63 - 1
INTS = st.one_of(
    st.integers(0, 4), st.sampled_from([-1, -HUGE - 1, HUGE, 2**31, 2**32, 2**64, 10**30, 1 << 16])
)
FLOATS = st.sampled_from([0.0, 0.01, -1.0, math.nan, math.inf, -math.inf, 1e308, 5e-324])
# Within 1 s each call succeeds that can, also on a busy machine: later draws depend on its success.
# No value overflows in pybind11's own conversion, as 300,000 years would.
DURATIONS = st.sampled_from(
    [timedelta(seconds=1), timedelta(0), timedelta(seconds=-1)]
    + [timedelta(days=sign * 100_000) for sign in (-1, 1)]
)
DTYPES = st.sampled_from(
    [
        *(torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool),
        *(torch.complex64, torch.quint8, torch.float8_e4m3fn),
    ]
)
DEVICES = st.sampled_from([torch.device(name) for name in ("cpu", "cpu:0", "meta", "cuda", "xpu")])


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


# Each value is created anew, since a program may leave hooks on it.
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "leaf": lambda: _leaf(torch.ones(3)),
    "wide leaf": lambda: _leaf(torch.ones(7, 5)),
    "double leaf": lambda: _leaf(torch.ones(4, dtype=torch.float64)),
    "half leaf": lambda: _leaf(torch.ones(4, dtype=torch.float16)),
    "complex leaf": lambda: _leaf(torch.ones(2, dtype=torch.complex64)),
    "scalar leaf": lambda: _leaf(torch.tensor(1.0)),
    "empty leaf": lambda: _leaf(torch.ones(0, 3)),
    "transposed leaf": lambda: _leaf(torch.ones(3, 2).t()),
    "strided leaf": lambda: _leaf(torch.ones(6)[::2]),
    "expanded leaf": lambda: _leaf(torch.ones(1).expand(4)),
    "sparse leaf": lambda: _leaf(torch.eye(3).to_sparse()),
    "CSR leaf": lambda: _leaf(torch.eye(3).to_sparse_csr()),
    "MKL-DNN leaf": lambda: _leaf(torch.ones(2, 2).to_mkldnn()),
    "meta leaf": lambda: _leaf(torch.ones(2, device="meta")),
    "lazy": lambda: torch.nn.UninitializedParameter(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(5)),
    "not a leaf": lambda: _leaf(torch.ones(3)) * 2,
    "without gradient": lambda: torch.ones(3),
    "NaN": lambda: torch.tensor([math.nan, math.inf]),
    "ints": lambda: torch.tensor([0, 2, 1]),
    "negative ints": lambda: torch.tensor([-7, 2**40]),
    "table of ints": lambda: torch.ones(2, 2, dtype=torch.int64),
    "no ints": lambda: torch.ones(0, dtype=torch.int64),
    "meta ints": lambda: torch.ones(2, dtype=torch.int64, device="meta"),
    "bools": lambda: torch.ones(3, dtype=torch.bool),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


ODD: list[Any] = [
    *(None, True, "", "text", "\0", "\ud800", b"\xff", [], [None], (), {}, 1j, object, _C),
    *([[]], [0] * 1000, range(3), NotImplemented, torch.float32, torch.device("cpu")),
]


def draw_tensor(draw: Callable[[Any], Any]) -> Drawn:
    kind = draw(st.sampled_from(list(TENSORS)))
    return Drawn(TENSORS[kind](), f"<tensor: {kind}>")


def _set_future(value: object) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def _raises(*_: object) -> None:
    raise RuntimeError("user code failed")


CALLABLES: dict[str, Callable[..., Any]] = {
    "good hook": lambda state, bucket: _set_future(bucket.buffer()),
    "hook without future": lambda state, bucket: bucket.buffer(),
    "future of None": lambda state, bucket: _set_future(None),
    "future of text": lambda state, bucket: _set_future("text"),
    "future of too much": lambda state, bucket: _set_future(torch.ones(1000)),
    "future of NaN": lambda state, bucket: _set_future(bucket.buffer() * math.nan),
    "future of sparse": lambda state, bucket: _set_future(torch.eye(3).to_sparse()),
    "future of complex": lambda state, bucket: _set_future(bucket.buffer().to(torch.complex64)),
    "future of meta": lambda state, bucket: _set_future(bucket.buffer().to("meta")),
    "does nothing": lambda *_: None,
    "raises": _raises,
}


class Groups:
    """The process groups, stores and backends for all examples, each of one rank."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ddpx-fuzz-"))
        self._numbers = itertools.count()
        self.store = self.new_store()
        c10d.ProcessGroupGloo = OneThreadGloo
        dist.init_process_group("gloo", store=self.new_store(), rank=0, world_size=1)
        destroyed = dist.new_group([0])
        destroyed_shm = dist.new_group([0], backend="shm")
        self.groups: dict[str, Any] = {
            "default group": dist.group.WORLD,
            "shm group": dist.new_group([0], backend="shm"),
            "destroyed group": destroyed,
            "destroyed shm group": destroyed_shm,
            "group without backend": dist.ProcessGroup(0, 1),
        }
        dist.destroy_process_group(destroyed)
        dist.destroy_process_group(destroyed_shm)

    def new_store(self) -> dist.FileStore:
        path = self._directory / str(next(self._numbers))  # a store deletes its file at its end
        path.touch()
        store = dist.FileStore(str(path), 1)
        store.set_timeout(timedelta(seconds=1))
        return store

    def new_gloo(self) -> dist.ProcessGroupGloo:
        return OneThreadGloo(self.new_store(), 0, 1, timeout=timedelta(seconds=1))


def draw_anything(draw: Callable[[Any], Any], groups: Groups) -> Drawn:
    """A value that most likely has the wrong type."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw_tensor(draw)
    if kind == 1:
        name = draw(st.sampled_from(list(groups.groups)))
        return Drawn(groups.groups[name], f"<{name}>")
    if kind == 2:
        name = draw(st.sampled_from(list(CALLABLES)))
        return Drawn(CALLABLES[name], f"<function: {name}>")
    if kind == 3:
        return literal(draw(INTS))
    if kind == 4:
        return literal(draw(FLOATS))
    return literal(draw(st.sampled_from(ODD)))
