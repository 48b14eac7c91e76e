"""``mixed_precision``, compared with a copy of the module in the lower precision, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raising import TEXT, Raises
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ddpx import ReducerDDP

MODES = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
}
CONFIGS = {
    "bf16": _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp16 summed in fp32": _MixedPrecision(torch.float16, torch.float32),
    "reduce_dtype left out": _MixedPrecision(torch.bfloat16),
    "bf16 summed in fp16": _MixedPrecision(torch.bfloat16, torch.float16),
    "only the sum": _MixedPrecision(None, torch.float16),
}


class Plain(nn.Module):
    """Has a frozen param, a shared layer and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), 0.25))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [p.dtype for p in self.parameters()] + [x.dtype]
        x = self.first(torch.tanh(self.first(x)))
        return self.last(x) * self.scale + self.shift.to(x.dtype)


class Checkpointed(Plain):
    """Backward runs the first layer again."""

    use_reentrant: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self._middle, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.last(x) * self.scale

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [p.dtype for p in self.parameters()]
        return self.first(torch.tanh(x))


class Reentrant(Checkpointed):
    use_reentrant = True


class NonReentrant(Checkpointed):
    use_reentrant = False


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.unsqueeze(0))[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(x.abs().long() % 8)))


def _expected_grads(
    module: nn.Module, config: Any, inputs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The gradients of a low-precision copy, summed and divided in the dtype of the sum."""
    low = copy.deepcopy(module)
    if config.param_dtype is not None:
        low.to(config.param_dtype)
        inputs = inputs.to(config.param_dtype)
    low(inputs).float().square().mean().backward()
    expected = {}
    for name, param in low.named_parameters():
        if param.grad is not None:
            summed = param.grad.to(config.reduce_dtype or config.param_dtype).to_dense()
            dist.all_reduce(summed)
            expected[name] = (summed / dist.get_world_size()).float()
    return expected


def _check_steps(build: Callable[[], nn.Module], config: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = build()
    model = ReducerDDP(module, mixed_precision=config, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(6, 8) * 3
        expected = _expected_grads(module, config, inputs)
        model(inputs).float().square().mean().backward()
        for name, param in module.named_parameters():
            assert isinstance(param, nn.Parameter) and param.dtype == torch.float32, name
            if param.requires_grad:
                assert param.grad is not None and param.grad.dtype == torch.float32
                assert torch.equal(param.grad.to_dense(), expected[name]), (step, name)
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                assert all(map(is_, layer._flat_weights, layer.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    for dtype in getattr(module, "seen", []):
        assert dtype == (config.param_dtype or torch.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_are_those_of_a_low_precision_copy(ranks, config, mode):
    ranks(2).run(_check_steps, Plain, CONFIGS[config], MODES[mode])


@pytest.mark.parametrize("mode", ["default", "static"])
@pytest.mark.parametrize("build", [Reentrant, NonReentrant, Recurrent, Tied])
def test_modules_that_hold_on_to_their_params(ranks, build, mode):
    ranks(2).run(_check_steps, build, CONFIGS["bf16"], MODES[mode])


class Drifting(Plain):
    """Each forward changes a buffer on rank 1 only.

    A forward outside backward first records its value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:
            self.recorded.append(float(self.shift[0]))
        with torch.no_grad():
            self.shift += dist.get_rank()
        return super().forward(x)


def _noted_buffers() -> list[float]:
    model = ReducerDDP(Drifting(), mixed_precision=CONFIGS["bf16"])
    for _ in range(4):
        with set_checkpoint_early_stop(False):  # otherwise the forward in backward stops early
            loss = checkpoint(model, torch.ones(2, 8), use_reentrant=False).sum()
        loss.backward()
        assert all(isinstance(param, nn.Parameter) for param in model.module.parameters())
    return model.module.recorded


def test_buffers_are_sent_around_forwards_within_a_backward(ranks):
    first, *others = ranks(2).run(_noted_buffers)
    assert len(first) == 4
    assert all(recorded == first for recorded in others)


def _check_what_is_cast() -> None:
    module = Plain()
    ReducerDDP._set_params_and_buffers_to_ignore_for_model(module, ["last.bias"])
    model = ReducerDDP(module, mixed_precision=CONFIGS["bf16"])
    assert module.shift.dtype == torch.bfloat16 and module.count.dtype == torch.int64
    for name, param in module.named_parameters():
        assert hasattr(param, "_mp_param") == (name != "last.bias"), name
    dtypes = {}
    module.register_forward_pre_hook(
        lambda *_: dtypes.update({name: p.dtype for name, p in module.named_parameters()})
    )
    with pytest.raises(RuntimeError, match="dtype"):  # the bias is in fp32, as requested
        model(torch.randn(2, 8))
    assert dtypes.pop("last.bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    assert {p.dtype for p in module.parameters()} == {torch.float32}  # also after the error


def test_ignored_params_and_integer_buffers_stay(ranks):
    ranks(2).run(_check_what_is_cast)


def _check_failed_backward() -> None:
    module = Plain()
    model = ReducerDDP(module, mixed_precision=CONFIGS["bf16"])
    inputs = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=TEXT):
        model(Raises.apply(inputs)).sum().backward()
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())
    # The gradients of the last layer had arrived. They have the dtype that the optimizer expects.
    assert module.last.weight.grad is not None
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}
    assert set(module.state_dict()) == {"scale", "shift", "count"} | {
        f"{layer}.{name}" for layer in ("first", "last") for name in ("weight", "bias")
    }
    model.zero_grad()
    expected = _expected_grads(module, CONFIGS["bf16"], inputs.detach())
    model(inputs).float().square().mean().backward()
    assert torch.equal(module.first.weight.grad, expected["first.weight"])


def test_params_are_back_after_a_backward_that_failed(ranks):
    ranks(2).run(_check_failed_backward)


def _check_accumulation() -> None:
    """Local gradients add up in full precision. Only their sum is rounded."""
    module = Plain()
    twin = copy.deepcopy(module)
    for param in twin.parameters():
        dist.broadcast(param.detach(), 0)
    model = ReducerDDP(module, mixed_precision=_MixedPrecision(torch.bfloat16, torch.float32))
    total: dict[str, torch.Tensor] = {}
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(6, 8)
        low = copy.deepcopy(twin).bfloat16()
        low(inputs.bfloat16()).float().square().mean().backward()
        for name, param in low.named_parameters():
            if param.grad is not None:
                total[name] = total.get(name, torch.zeros(())) + param.grad.float()
        model.set_requires_gradient_sync(step == 2)
        model(inputs).float().square().mean().backward()
        assert all(p.grad.dtype == p.dtype for p in module.parameters() if p.requires_grad)
    for name, grad in total.items():
        dist.all_reduce(grad)
        assert torch.equal(module.get_parameter(name).grad, grad / 2), name


def test_accumulated_gradients_keep_their_precision(ranks):
    ranks(2).run(_check_accumulation)


def _check_arrival(view: bool) -> list[torch.dtype]:
    model = ReducerDDP(Plain(), mixed_precision=CONFIGS["bf16"], gradient_as_bucket_view=view)
    dtypes: list[torch.dtype] = []
    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(lambda grad: dtypes.append(grad.dtype))
    model(torch.randn(2, 8)).float().sum().backward()
    return dtypes


@pytest.mark.parametrize("view", [False, True])
def test_gradients_arrive_in_low_precision(ranks, view):
    """Gradients are packed as they arrive. A cast to full precision and back would cost memory."""
    for dtypes in ranks(2).run(_check_arrival, view):
        assert dtypes == [torch.bfloat16] * 4


def _check_without_hooks() -> None:
    module = Plain()
    model = ReducerDDP(module, mixed_precision=CONFIGS["bf16"])
    model._remove_autograd_hooks()
    model(torch.randn(2, 8)).float().sum().backward()
    assert module.first.weight.grad.dtype == torch.float32


def test_gradients_that_nobody_sums_keep_their_dtype(ranks):
    ranks(2).run(_check_without_hooks)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x.abs().long() % 8)


@pytest.mark.parametrize("config", ["bf16", "fp16 summed in fp32"])
def test_sparse_gradients(ranks, config):
    ranks(2).run(_check_steps, Sparse, CONFIGS[config], {})


def _check_uneven_inputs() -> None:
    """A rank without inputs sends zeros in the dtype of its peers."""
    module = Plain()
    model = ReducerDDP(module, mixed_precision=CONFIGS["bf16"])
    inputs = [torch.randn(6, 8) for _ in range(2 - dist.get_rank())]
    low = copy.deepcopy(module).bfloat16()
    low(inputs[-1].bfloat16()).float().square().mean().backward()
    with model.join():
        for x in inputs:
            model.zero_grad()
            model(x).float().square().mean().backward()
    if dist.get_rank() == 0:
        for name, param in low.named_parameters():
            if param.grad is not None:
                assert torch.equal(module.get_parameter(name).grad, (param.grad / 2).float()), name


def test_uneven_inputs(ranks):
    ranks(2).run(_check_uneven_inputs)


def _check_second_hook() -> None:
    model = ReducerDDP(Plain(), mixed_precision=CONFIGS["bf16"])
    with pytest.raises(RuntimeError, match="hook"):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(RuntimeError, match="mixed_precision"):
        model._update_process_group(dist.group.WORLD)
    twin = copy.deepcopy(model)
    twin(torch.randn(2, 8)).float().sum().backward()
    assert twin.module.first.weight.grad.dtype == torch.float32


def test_it_takes_the_place_of_a_hook_and_can_be_copied(ranks):
    ranks(2).run(_check_second_hook)


class _Replacing(nn.Module):
    """Each forward puts another parameter in the place of its weight, as pruning does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.made: list[nn.Parameter] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        self.made.append(nn.Parameter(torch.ones(4, 4)))
        self.layer.weight = self.made[-1]
        return output


def _check_param_of_a_forward() -> None:
    model = ReducerDDP(_Replacing(), mixed_precision=_MixedPrecision(torch.bfloat16))
    output = model(torch.ones(2, 4))
    assert model.module.layer.weight is model.module.made[0]
    assert model.module.layer.bias.dtype is torch.float32
    with pytest.raises(RuntimeError, match=r"1 new parameter: layer\.weight"):
        output.sum().backward()


def test_a_parameter_that_the_forward_has_replaced(ranks):
    ranks(2).run(_check_param_of_a_forward)


def _check_ignored_buffer() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ReducerDDP._set_params_and_buffers_to_ignore_for_model(module, ["1.running_mean"])
    dtype = torch.bfloat16
    ReducerDDP(module, mixed_precision=_MixedPrecision(dtype, dtype, dtype))
    assert module[1].running_mean.dtype is torch.float32
    assert module[1].running_var.dtype is dtype


def test_ignored_buffers_keep_their_dtype(ranks):
    ranks(2).run(_check_ignored_buffer)
