"""Optimizers that step while backward runs: by bucket, or in autograd hooks of params."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from both_wrappers import (
    SMALL_CAP,
    WRAPPERS,
    Mlp,
    Wrapper,
    assert_same_on_all_ranks,
    assert_trains_alike,
    mlp_step,
)
from modes import MODES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.optim import _apply_optimizer_in_backward, as_functional_optim
from torch.distributed.optim.apply_optimizer_in_backward import _get_in_backward_optimizers

import ddpx
from ddpx import ReducerDDP

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6}),
}


class _NoStep(torch.optim.Optimizer):
    """For ``record_training``, since the wrapper makes the optimizer's steps."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        pass


def _check_fused(optimizer: str, mode: str, caps: dict[str, float], only_some: bool) -> None:
    cls_of_optimizer, options = OPTIMIZERS[optimizer]

    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, **MODES[mode], **caps)
        some = [module.first.weight, module.third.bias] if only_some else None
        betas = options.get("betas")
        arguments = {k: v for k, v in options.items() if k != "betas"}
        if betas:
            arguments["betas"] = betas
        model._register_fused_optim(cls_of_optimizer, optim_params=some, **arguments)
        return model

    assert_trains_alike(Mlp, wrap, mlp_step, make_optimizer=_NoStep)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caps", [{}, SMALL_CAP], ids=["one bucket", "several buckets"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_optimizer(ranks, optimizer, mode, caps):
    ranks(2).run(_check_fused, optimizer, mode, caps, False)


@pytest.mark.parametrize("mode", MODES)
def test_fused_optimizer_of_some_params(ranks, mode):
    ranks(2).run(_check_fused, "SGD", mode, SMALL_CAP, True)


def _check_fused_equals_step(optimizer: str) -> None:
    """The weights equal those of an optimizer step after backward."""
    cls_of_optimizer, options = OPTIMIZERS[optimizer]
    models = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = ReducerDDP(Mlp(), **SMALL_CAP)
        models.append(model)
        stepper = None
        if fused:
            model._register_fused_optim(cls_of_optimizer, **options)
        else:
            stepper = cls_of_optimizer(model.parameters(), foreach=False, **options)
        for number in range(4):
            model.zero_grad()
            torch.manual_seed(10 * number + dist.get_rank())
            mlp_step(model)
            if stepper is not None:
                stepper.step()
    ours, expected = (model.module for model in models)
    torch.manual_seed(0)
    at_first = Mlp()
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param, expected.get_parameter(name))
        assert not torch.equal(param, at_first.get_parameter(name))
        assert_same_on_all_ranks(param)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_optimizer_equals_the_usual_step(ranks, optimizer):
    ranks(2).run(_check_fused_equals_step, optimizer)


def _check_hook_then_optimizer(hook: Callable[..., Any], some: bool, mode: str) -> None:
    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        model = cls(module, **MODES[mode], **SMALL_CAP)
        functional = as_functional_optim(torch.optim.SGD, 0.1, momentum=0.5)
        params = [module.second.weight] if some else None
        state = _OptimizerHookState(functional, params)
        model.register_comm_hook(None, _hook_then_optimizer(hook, state))
        return model

    assert_trains_alike(Mlp, wrap, mlp_step, make_optimizer=_NoStep)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("some", [False, True], ids=["all params", "some params"])
@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook])
def test_hook_then_optimizer(ranks, hook, some, mode):
    ranks(2).run(_check_hook_then_optimizer, hook, some, mode)


def _check_refused() -> None:
    model = ReducerDDP(Mlp())
    with pytest.raises(ValueError, match="functional"):
        model._register_fused_optim(torch.optim.LBFGS)
    mlp_step(model)  # no optimizer has been registered
    assert_same_on_all_ranks(*(param.grad for param in model.module.parameters()))


def test_optimizer_without_functional_form_is_refused(ranks):
    ranks(2).run(_check_refused)


# At the end of backward, torch's hook asks for the accelerator's stream, even without accelerator.
_no_streams = functools.partial(
    mock.patch.object, torch.accelerator, "current_stream", return_value=mock.Mock()
)


def _check_in_backward(optimizer: str, mode: str, only_some: bool, num_optimizers: int) -> None:
    cls_of_optimizer, options = OPTIMIZERS[optimizer]

    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        for param in module.parameters():  # hooks that change no param
            param.register_post_accumulate_grad_hook(lambda _: None)
        params = list(module.parameters())[:3] if only_some else list(module.parameters())
        for _ in range(num_optimizers):
            _apply_optimizer_in_backward(cls_of_optimizer, params, dict(options))
        return cls(module, **MODES[mode], **SMALL_CAP)

    def without_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        rest = [param for param in params if not hasattr(param, "_in_backward_optimizers")]
        return torch.optim.SGD(rest, lr=0.1) if rest else _NoStep([torch.nn.Parameter()])

    with _no_streams():
        assert_trains_alike(Mlp, wrap, mlp_step, make_optimizer=without_optimizer)


@pytest.mark.parametrize("mode", ["default", "view", "static"])
@pytest.mark.parametrize("num_optimizers", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_in_backward(ranks, optimizer, num_optimizers, mode):
    ranks(2).run(_check_in_backward, optimizer, mode, False, num_optimizers)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_in_backward_of_some_params(ranks, optimizer):
    """With views. Without views, DDP leaves the gradients of the other params local."""
    ranks(2).run(_check_in_backward, optimizer, "view", True, 1)


def _check_others_are_averaged(mode: str) -> None:
    torch.manual_seed(0)
    module = Mlp()
    twin = copy.deepcopy(module)
    others = ("third.weight", "third.bias")
    in_backward = [param for name, param in module.named_parameters() if name not in others]
    _apply_optimizer_in_backward(torch.optim.SGD, in_backward, {"lr": 0.1})
    model = ReducerDDP(module, **MODES[mode], **SMALL_CAP)
    for number in range(3):
        for either in (model, twin):
            torch.manual_seed(10 * number + dist.get_rank())
            either.zero_grad()
            with _no_streams():
                mlp_step(either)
        for name, param in twin.named_parameters():
            dist.all_reduce(param.grad.div_(2))
            if name in others:
                assert torch.equal(module.get_parameter(name).grad, param.grad), name
            else:
                param.data.add_(param.grad, alpha=-0.1)
                assert torch.equal(module.get_parameter(name), param), name


@pytest.mark.parametrize("mode", ["default", "view", "static"])
def test_other_params_are_averaged(ranks, mode):
    ranks(2).run(_check_others_are_averaged, mode)


def _check_in_backward_leaves_no_grads(mode: str) -> None:
    for cls in WRAPPERS:
        module = Mlp()
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        assert len(_get_in_backward_optimizers(module)) == 6
        model = cls(module, **MODES[mode])
        before = [param.detach().clone() for param in module.parameters()]
        for _ in range(3):
            with _no_streams():
                mlp_step(model)
            assert all(param.grad is None for param in module.parameters())
        assert not any(map(torch.equal, before, module.parameters()))
        assert_same_on_all_ranks(*module.parameters())


@pytest.mark.parametrize("mode", ["default", "view", "static"])
def test_optimizer_in_backward_leaves_no_gradients(ranks, mode):
    ranks(2).run(_check_in_backward_leaves_no_grads, mode)


class _SomeParameters(Mlp):
    """A library's module: parameters() has what another optimizer trains."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.third.parameters(recurse)


def _check_own_parameters_method() -> None:
    for cls in WRAPPERS:
        module = _SomeParameters()
        _apply_optimizer_in_backward(torch.optim.SGD, module.first.parameters(), {"lr": 0.1})
        model = cls(module)
        before = {name: param.detach().clone() for name, param in module.named_parameters()}
        torch.manual_seed(dist.get_rank())
        with _no_streams():
            mlp_step(model)
        assert_same_on_all_ranks(*(param for _, param in module.named_parameters()))
        assert not torch.equal(module.first.weight, before["first.weight"])
        assert torch.equal(module.third.weight, before["third.weight"])


def test_optimizer_in_backward_of_a_module_with_its_own_parameters_method(ranks):
    ranks(2).run(_check_own_parameters_method)


def _check_copy_of_a_trained_wrapper() -> None:
    """The optimizer is applied to the copy, before its first forward."""
    model = ReducerDDP(Mlp())
    mlp_step(model)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    _apply_optimizer_in_backward(torch.optim.SGD, twin.module.parameters(), {"lr": 0.1})
    before = [param.detach().clone() for param in twin.module.parameters()]
    torch.manual_seed(dist.get_rank())
    with _no_streams():
        mlp_step(twin)
    assert not any(map(torch.equal, before, twin.module.parameters()))
    assert_same_on_all_ranks(*twin.module.parameters())


def test_optimizer_in_backward_of_a_copy(ranks):
    ranks(2).run(_check_copy_of_a_trained_wrapper)


def _check_hook_of_optimizers() -> None:
    module = Mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = ReducerDDP(module)
    with _no_streams():
        mlp_step(model)
    name = ddpx.logging_data(model)["comm_hook"]
    assert "apply_optim_in_backward_hook" in name and "<locals>.averaged" not in name
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_the_hook_of_optimizers_has_torchs_name_and_keeps_no_wrapper(ranks):
    ranks(2).run(_check_hook_of_optimizers)


def _check_copy_of_a_wrapper_with_an_optimizer() -> None:
    """The copy averages gradients only."""
    model = ReducerDDP(Mlp())
    model._register_fused_optim(torch.optim.SGD, 0.1)
    twin = copy.deepcopy(model)
    before = [param.detach().clone() for param in model.parameters()]
    torch.manual_seed(dist.get_rank())
    with _no_streams():
        mlp_step(twin)
    for each in (model, twin):
        assert all(map(torch.equal, before, each.parameters()))
    assert_same_on_all_ranks(*(param.grad for param in twin.parameters()))


def test_fused_optimizer_stays_with_the_original(ranks):
    ranks(2).run(_check_copy_of_a_wrapper_with_an_optimizer)


def _check_function_with_some_params() -> None:
    module = Mlp()
    model = ReducerDDP(module)
    params = [module.first.weight]
    ddpx.register_fused_optim(model, torch.optim.SGD, lr=0.1, optim_params=params)
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    with _no_streams():
        mlp_step(model)
    changed = [n for n, param in module.named_parameters() if not torch.equal(param, before[n])]
    assert changed == ["first.weight"]


def test_function_with_some_params(ranks):
    ranks(2).run(_check_function_with_some_params)


def _fused_in_a_part(replicated: bool) -> float:
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    wrap = ddpx.replicate if replicated else ReducerDDP
    model = wrap(module, process_group=group)
    ddpx.register_fused_optim(model, torch.optim.SGD, 1.0)
    model(torch.full((1, 1), 1.0 + rank)).backward()
    return module.weight.item()


@pytest.mark.parametrize("replicated", [False, True], ids=["wrapper", "replicate"])
def test_fused_optimizer_of_a_part_of_the_ranks(ranks, replicated):
    """DDP averages over all ranks of the job."""
    assert ranks(3).run(_fused_in_a_part, replicated) == [-1.5, -1.5, -3.0]


def _check_own_method() -> None:
    from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap as overlap

    wrappers = []

    class Own(torch.optim.SGD):
        pass

    class Overlapped(overlap._OverlappedStandardOptimizer):
        def __init__(self, _: type, *args: Any) -> None:
            super().__init__(torch.optim.SGD, *args)

        def register_ddp(self, wrapper: Any) -> None:
            if wrappers:
                raise NotImplementedError
            wrappers.append(wrapper)

    with mock.patch.dict(overlap._registered_overlapped_optims, {Own: Overlapped}):
        model = ReducerDDP(Mlp())
        model._register_fused_optim(Own, 0.1)
        assert wrappers == [model]
        with pytest.raises(RuntimeError, match=r"Own.*Overlapped, .* has no register_ddp\(\)"):
            model._register_fused_optim(Own, 0.1)


def test_an_optimizer_with_a_method_of_its_own(ranks):
    """The script has registered it with torch."""
    ranks(1).run(_check_own_method)


def _check_reducer_without_wrapper() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    model = ReducerDDP(module)
    model._register_fused_optim(torch.optim.SGD, 1.0)
    loss = model(torch.full((1, 1), 1.0 + dist.get_rank()))
    reducer = model.reducer
    del model
    loss.backward()
    assert reducer is not None and module.weight.item() == -1.5


def test_fused_optimizer_of_a_reducer_whose_wrapper_is_gone(ranks):
    ranks(2).run(_check_reducer_without_wrapper)


def _lose_the_average(group: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_exception(RuntimeError("the connection is lost"))
    return future


def _check_failed_average(mode: str) -> None:
    model = ReducerDDP(Mlp(), **MODES[mode], **SMALL_CAP)
    model._register_fused_optim(torch.optim.SGD, 0.1)
    mlp_step(model, 0)
    before = copy.deepcopy(model.module.state_dict())
    hooks = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    with (
        mock.patch(f"{hooks}.allreduce_hook", _lose_the_average),
        pytest.raises(RuntimeError, match="the connection is lost"),
    ):
        mlp_step(model, 1)
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("mode", MODES)
def test_no_optimizer_runs_after_a_failed_average(ranks, mode):
    """Of DDP, the optimizer takes local gradients, and backward raises no error."""
    ranks(2).run(_check_failed_average, mode)
