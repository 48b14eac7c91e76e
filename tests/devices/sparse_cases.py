"""Sparse gradients whose rows are known, with hooks on several streams.

The functions run on every rank.
"""

from __future__ import annotations

import contextlib

import late_device
import torch
import torch.distributed as dist
from abort_cases import fail
from device_models import Pairs, accumulate_on
from torch import nn

from ddpx import ReducerDDP

NUM_ROWS = 12
WIDTH = 8
_FILL = 10**6  # no row


class _Net(nn.Module):
    """The sparse gradient arrives first, and its bucket is the last one."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to(device)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        return (hidden + self.embedding(rows)).square().sum()


def _rows(rank: int) -> torch.Tensor:
    return torch.tensor([1 + rank, 5, 5, 9 - rank])


def _inputs(device: str, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator).to(device), _rows(rank).to(device)


def _expected(step: int) -> torch.Tensor:
    total = torch.zeros(NUM_ROWS, WIDTH)
    size = dist.get_world_size()
    for rank in range(size):
        net = _Net("cpu")
        net(*_inputs("cpu", step, rank)).backward()
        assert net.embedding.weight.grad is not None
        total += net.embedding.weight.grad.to_dense() / size
    return total


class _Training:
    """A wrapped module. The hook of each parameter runs on a stream of its own."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.net = _Net(device)
        self.weight = self.net.embedding.weight
        self.main = torch.accelerator.current_stream()
        self.sparse, self.dense = (torch.Stream(device=device) for _ in range(2))
        self._nodes = [
            accumulate_on(self.weight, self.sparse),
            accumulate_on(self.net.linear.weight, self.dense),
        ]
        # With this option buckets keep their order, so the dense hook launches both.
        self.model = ReducerDDP(self.net, find_unused_parameters=True)
        used = torch.cat([_rows(rank) for rank in range(dist.get_world_size())]).unique()
        self.model._set_sparse_metadata({"embedding.weight": used.to(device)})

    def backward(self, step: int) -> None:
        self.model.zero_grad()
        self.model(*_inputs(self.device, step, dist.get_rank())).backward()

    def pair(self, values: torch.Tensor, step: int) -> Pairs:
        """The average with these values, and its expected value."""
        assert self.weight.grad is not None
        rows = self.weight.grad._indices().cpu()
        average = torch.zeros(NUM_ROWS, WIDTH).index_add_(0, rows[0], values.cpu())
        return [(average, _expected(step))]


def average(device: str) -> Pairs:
    training = _Training(device)
    pairs: Pairs = []
    for step in range(3):
        training.backward(step)
        assert training.weight.grad is not None
        pairs += training.pair(training.weight.grad._values(), step)
    return pairs


def drop_an_average_while_it_is_read(device: str) -> Pairs:
    """The caller's stream reads the average. The script drops the average meanwhile."""
    training = _Training(device)
    pairs: Pairs = []
    for step in range(3):
        training.backward(step)
        assert training.weight.grad is not None
        grad = training.weight.grad
        rows, doubled = grad._indices() * 1, grad._values() * 2
        grad = training.weight.grad = None
        with training.sparse:
            others = _fill_memory(device)
        with training.dense:
            others += _fill_memory(device)
        training.weight.grad = torch.sparse_coo_tensor(rows, doubled, training.weight.shape)
        pairs += training.pair(doubled / 2, step)
        del others
    return pairs


def drop_a_gradient_of_another_stream(device: str) -> Pairs:
    """A hook puts a gradient of a side stream in place of the gradient that arrived."""
    training = _Training(device)
    side = torch.Stream(device=device)

    def replace(param: torch.Tensor) -> None:
        assert param.grad is not None
        side.wait_stream(training.sparse)
        with side:
            rows, values = param.grad._indices() * 1, param.grad._values() * 1
            param.grad = torch.sparse_coo_tensor(rows, values, param.shape)
        training.sparse.wait_stream(side)

    training.weight.register_post_accumulate_grad_hook(replace)
    pairs: Pairs = []
    for step in range(3):
        with late_device.slow("div", 100):
            training.backward(step)
            with side:
                others = _fill_memory(device)
            training.sparse.synchronize()
        del others
        assert training.weight.grad is not None
        pairs += training.pair(training.weight.grad._values(), step)
    return pairs


def fail_before_rows_are_read(device: str) -> Pairs:
    """A backward raises while the rows of its sparse gradient are about to be read.

    Returns the average of a later step.
    """
    training = _Training(device)
    for step in range(2):
        training.backward(step)
    training.model.zero_grad()
    for stream in (training.main, training.sparse, training.dense):
        stream.synchronize()
    x, rows = _inputs(device, 2, dist.get_rank())
    x.requires_grad_()
    x.register_hook(fail)
    with late_device.slow("searchsorted", 200):
        with contextlib.suppress(ValueError):
            training.model(x * 1, rows).backward()
        training.model.reset()
        training.model.zero_grad()
        with training.sparse:
            others = _fill_memory(device)
        training.dense.synchronize()
    del others
    training.backward(3)
    assert training.weight.grad is not None
    return training.pair(training.weight.grad._values(), 3)


def _fill_memory(device: str) -> list[torch.Tensor]:
    """Takes and fills freed memory of the current stream."""
    tensors = [torch.empty(4, dtype=torch.int64, device=device) for _ in range(200)]
    for tensor in tensors:
        tensor.fill_(_FILL)
    torch.accelerator.current_stream().synchronize()
    return tensors
