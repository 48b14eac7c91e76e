"""torch.compile inside and around the wrapper: Dynamo splits its graphs at the wrapper's
buckets, too."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from both_wrappers import WRAPPERS, Wrapper, assert_same_on_all_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

# a layer has 1 MiB: Dynamo's first bucket is no larger, and its other buckets are no smaller
_WIDTH = 512


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class _Counter:
    """A backend that counts the operations of each graph and runs the graph unchanged."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward


def _inside(cls: Callable[..., Wrapper], backend: Any, **options: Any) -> Wrapper:
    return cls(torch.compile(_Deep(), backend=backend), **options)


def _around(cls: Callable[..., Wrapper], backend: Any, **options: Any) -> Wrapper:
    return torch.compile(cls(_Deep(), **options), backend=backend)


def _eager(cls: Callable[..., Wrapper], backend: Any, **options: Any) -> Wrapper:
    return cls(_Deep(), **options)


def _train(make: Any, cls: Any, backend: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    """Gradients of the last of three steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make(cls, backend, **options)
    for number in range(3):
        model.zero_grad()
        torch.manual_seed(10 * number + dist.get_rank())
        model(torch.randn(4, _WIDTH)).square().mean().backward()
    return [param.grad.clone() for param in model.parameters()]


def _check_splits(make: Any, options: dict[str, Any], optimize_ddp: Any) -> list[int]:
    sizes = []
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        for cls in WRAPPERS:
            counter = _Counter()
            grads = _train(make, cls, counter, options)
            assert_same_on_all_ranks(*grads)
            assert all(map(torch.equal, grads, _train(_eager, cls, None, options)))
            sizes.append(counter.sizes)
    theirs, ours = sizes
    assert ours == theirs
    return ours


_OPTIONS = {
    "a bucket a layer": ({"bucket_cap_mb": 1}, 6),
    "two layers a bucket": ({"bucket_cap_mb": 2}, 4),
    "one bucket": ({"bucket_cap_mb": 100}, 2),
    "views": ({"bucket_cap_mb": 1, "gradient_as_bucket_view": True}, 6),
    "static graph": ({"bucket_cap_mb": 1, "static_graph": True}, 6),
    "find unused": ({"bucket_cap_mb": 1, "find_unused_parameters": True}, 6),
}


@pytest.mark.parametrize(
    "make, options",
    [(_inside, name) for name in _OPTIONS] + [(_around, "a bucket a layer")],
)
def test_graph_is_split_at_buckets(ranks, make, options):
    arguments, num_graphs = _OPTIONS[options]
    for sizes in ranks(2).run(_check_splits, make, arguments, True):
        assert len(sizes) == num_graphs


class _Meeting(nn.Module):
    """A forward that waits until the test lets it end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.set()
        assert self.may_end.wait(30)
        return self.layer(x)


def _check_forwards_that_overlap() -> None:
    """Two threads: the forward that begins first also ends first.

    Afterwards no wrapper is active.
    """
    models = [ReducerDDP(_Meeting()) for _ in range(2)]
    threads = [threading.Thread(target=model, args=(torch.ones(1, 2),)) for model in models]
    for thread, model in zip(threads, models, strict=True):
        thread.start()
        assert model.module.begun.wait(30)
    for thread, model in zip(threads, models, strict=True):
        model.module.may_end.set()
        thread.join()
    assert DistributedDataParallel._get_active_ddp_module() is None


def test_forwards_of_two_threads_leave_no_active_wrapper(ranks):
    ranks(2).run(_check_forwards_that_overlap)


@pytest.mark.parametrize("make", [_inside, _around])
def test_graph_is_whole_without_ddp_optimizer(ranks, make):
    for sizes in ranks(2).run(_check_splits, make, {"bucket_cap_mb": 1}, False):
        assert len(sizes) == 1


def _check_ignored_params() -> None:
    """Params that the wrapper ignores count in Dynamo's buckets as under DDP."""
    lengths = []
    for cls in WRAPPERS:
        torch._dynamo.reset()
        counter = _Counter()
        module = _Deep()
        cls._set_params_and_buffers_to_ignore_for_model(
            module, ["layers.1.weight", "layers.2.weight"]
        )
        model = cls(torch.compile(module, backend=counter), bucket_cap_mb=1)
        model(torch.randn(4, _WIDTH)).square().mean().backward()
        lengths.append(counter.sizes)
    assert lengths[0] == lengths[1]
    assert len(lengths[0]) > 1


def test_ignored_params_split_alike(ranks):
    ranks(2).run(_check_ignored_params)


def _check_compiled_autograd() -> None:
    torch.manual_seed(0)
    model = ReducerDDP(nn.Linear(4, 4))
    inputs = torch.randn(2, 4)
    for _ in range(2):
        loss = model(inputs).sum()
        with (
            pytest.raises(RuntimeError, match=r"config\.compiled_autograd = False"),
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        ):
            loss.backward()
        loss.backward()  # a backward of the same graph, since the error came before anything ran
        model.zero_grad()


@pytest.mark.timeout(120)
def test_compiled_autograd_is_refused(ranks):
    ranks(2).run(_check_compiled_autograd)


def _check_hooks_under_compiled_autograd(bypass: bool) -> None:
    """Each kind of hook raises the error, also if it is the only hook in the graph."""
    model = ReducerDDP(nn.Linear(4, 4))
    module = model.module
    with pytest.raises(RuntimeError, match="compiled autograd cannot trace"):
        if bypass:
            loss = module(torch.ones(1, 4)).sum()  # the graph has accumulator hooks only
        else:
            for param in model.parameters():
                param.requires_grad_(False)
            # the graph has an output hook only
            loss = model(torch.ones(1, 4, requires_grad=True)).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bypass", [False, True])
def test_each_hook_refuses_compiled_autograd(ranks, bypass):
    ranks(2).run(_check_hooks_under_compiled_autograd, bypass)


def _check_aot(make: Any) -> None:
    """Graphs of the backward, too: one per bucket, so that communication overlaps."""
    results = [_train(make, cls, "aot_eager", {"bucket_cap_mb": 1}) for cls in WRAPPERS]
    assert all(map(torch.equal, *results))
    for ours, eager in zip(results[1], _train(_eager, ReducerDDP, None, {}), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("make", [_inside, _around])
def test_aot_autograd(ranks, make):
    ranks(2).run(_check_aot, make)


def _check_no_recompilation(make: Any) -> None:
    """Each graph is compiled once, even if the reducer rebuilds buckets between steps."""
    torch._dynamo.reset()
    counter = _Counter()
    model = make(ReducerDDP, counter, bucket_cap_mb=1)
    num_graphs = []
    for _ in range(5):
        model(torch.randn(4, _WIDTH)).square().mean().backward()
        with model.no_sync():
            model(torch.randn(4, _WIDTH)).square().mean().backward()
        num_graphs.append(len(counter.sizes))
    assert num_graphs == [6] * 5


@pytest.mark.parametrize("make", [_inside, _around])
def test_no_recompilation(ranks, make):
    ranks(2).run(_check_no_recompilation, make)


def _check_python_reducer(mode: str) -> None:
    """Modes that replace DDP's reducer by another one.

    ReducerDDP keeps its own, with correct results.
    """
    with torch._dynamo.config.patch(optimize_ddp=mode):
        counter = _Counter()
        grads = _train(_around, ReducerDDP, counter, {"bucket_cap_mb": 1})
        expected = _train(_eager, ReducerDDP, None, {"bucket_cap_mb": 1})
    assert len(counter.sizes) == 1
    assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize("mode", ["python_reducer", "python_reducer_without_compiled_forward"])
def test_python_reducer_modes(ranks, mode):
    ranks(2).run(_check_python_reducer, mode)


class _Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.active: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.active.append(DistributedDataParallel._get_active_ddp_module())
        return self.layer(x)


def _check_active_module() -> None:
    """The wrapper is active only while its forward runs, also if that raises.

    The innermost one counts.
    """
    inner = ReducerDDP(_Looks())
    outer = ReducerDDP(nn.Sequential(_Looks(), nn.Linear(4, 4)))
    outer(torch.ones(1, 4))
    inner(torch.ones(1, 4))
    assert outer.module[0].active == [outer]
    assert inner.module.active == [inner]
    with pytest.raises(RuntimeError, match="shape"):
        inner(torch.ones(1, 5))
    for cls in WRAPPERS:
        assert cls._get_active_ddp_module() is None  # type: ignore[attr-defined]


def test_active_module(ranks):
    ranks(2).run(_check_active_module)


_ONE_STEP = """
import sys, torch, torch.distributed as dist, ddpx
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = ddpx.ReducerDDP(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert "torch._dynamo" not in sys.modules
"""


def test_dynamo_is_imported_only_to_compile():
    """The import takes a second on each rank."""
    subprocess.run([sys.executable, "-c", _ONE_STEP], check=True, timeout=60)
