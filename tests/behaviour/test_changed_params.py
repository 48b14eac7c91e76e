"""Parameters that are frozen, unfrozen, replaced, cast or moved after wrapping."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from fake_groups import RecordingGroup
from torch import nn
from torch.func import functional_call

from ddpx import ReducerDDP

SECOND = {"second.weight", "second.bias"}


def _freeze(frozen: bool, *modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(not frozen)


def _frozen_first() -> nn.Module:
    net = ref.Net()
    _freeze(True, net.second)
    return net


def _check_unfrozen(bypass: bool, mode: str) -> None:
    """Forward reports the parameters, or the backward if forward is bypassed.

    Then they are frozen again.
    """
    ours, slow = ref.make_pair(_frozen_first, mode)

    def step(model: nn.Module, number: int) -> None:
        ref.backward(model, ref.loss_of((ref.bare(model) if bypass else model)(ref.data())))

    for number in range(2):
        ref.check_steps(ours, slow, step, 2)
        ref.zero_grads("none", ours)
        _freeze(False, ours.module.second)
        text = ref.error_of(step, ours, number) if bypass else ref.error_of(ours, ref.data())
        ref.assert_names(text, SECOND, "wrap")
        _freeze(True, ours.module.second)
    ref.check_steps(ours, slow, step, 2)


@ref.modes
@pytest.mark.parametrize("bypass", [False, True], ids=["wrapper", "module"])
def test_unfrozen(ranks, bypass, mode, world):
    ref.on_ranks(ranks, world, _check_unfrozen, bypass, mode)


WHERE: dict[str, Callable[[int], bool]] = {
    "everywhere": lambda step: True,
    "on rank 0": lambda step: dist.get_rank() == 0,
    "not on rank 0": lambda step: dist.get_rank() != 0,
    "in turn": lambda step: step % dist.get_world_size() == dist.get_rank(),
}


def _cases_of_freezing() -> list[tuple[str, str]]:
    """Where parameters are frozen, and modes: some need the same frozen parameters on all ranks."""
    return [(where, mode) for where in WHERE for mode in ref.MODES if not _differs(where, mode)]


def _differs(where: str, mode: str) -> bool:
    return where != "everywhere" and not mode.startswith("unused")


def _check_frozen(where: str, mode: str, num_before: int) -> None:
    """A ``grad`` that is frozen on all ranks stays None.

    If a rank still trains the parameter, all ranks get the mean, which counts zeros for the others.
    """
    ours, slow = ref.make_pair(ref.Net, mode)
    ref.check_steps(ours, slow, ref.plain_step, num_before)
    for number in range(4):
        for model in (ours, slow):
            _freeze(WHERE[where](number), model.module.second)
        ref.check_steps(ours, slow, ref.plain_step, 1, first=number)
        for model in (ours, slow):
            _freeze(False, model.module.second)
    ref.check_steps(ours, slow, ref.plain_step, 3)


@pytest.mark.parametrize("num_before", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize(("where", "mode"), _cases_of_freezing())
def test_frozen(ranks, where, num_before, mode, world):
    ref.on_ranks(ranks, world, _check_frozen, where, mode, num_before)


def _check_frozen_keeps_grad(mode: str) -> None:
    """A frozen parameter keeps its earlier ``grad``, even if that was in a bucket.

    The test of frozen adapters compares kept gradients with those of DDP.
    """
    ours, slow = ref.make_pair(ref.Net, mode)
    ref.check_steps(ours, slow, ref.plain_step, 2)
    held = copy.deepcopy([param.grad for param in ours.module.second.parameters()])
    for number in range(2):
        for model in (ours, slow):
            model.module.first.zero_grad()
            model.module.third.zero_grad()
            _freeze(True, model.module.second)
        ref.run_both(ours, slow, ref.plain_step, number)
        ref.assert_same(ours, slow, SECOND)
        for param, before in zip(ours.module.second.parameters(), held, strict=True):
            if mode == "unused-view":  # averaged where it lies, as in DDP
                torch.testing.assert_close(param.grad, before, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(param.grad, before)
    for model in (ours, slow):
        _freeze(False, model.module.second)
    ref.check_steps(ours, slow, ref.plain_step)


@ref.modes
def test_frozen_keeps_its_gradient(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_frozen_keeps_grad, mode)


def _adversarial_step(generator: nn.Module, critic: nn.Module, log: list[str]) -> None:
    noise = ref.data()
    loss = critic(torch.randn(3, 3).double()).mean() - critic(generator(noise).detach()).mean()
    ref.backward(critic, loss)
    _freeze(True, critic)
    before = log.count("launch")
    loss = ref.loss_of(critic(generator(noise)))
    # The backwards of both wrappers end here. The critic has nothing to average.
    loss.backward()
    if isinstance(generator, ref.SlowDDP):
        generator.average()
    _freeze(False, critic)
    assert log.count("launch") == before


def _check_adversarial(mode: str) -> None:
    """The generator's step goes through the frozen critic, which does not communicate."""
    generator, slow_generator = ref.make_pair(ref.Net, mode)
    critic = ref.build_same(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    slow_critic = ref.SlowDDP(copy.deepcopy(critic))
    log: list[str] = []
    group = RecordingGroup(log)
    our_critic = ReducerDDP(
        critic, process_group=group, init_sync=False, bucket_cap_mb=ref.SMALL_CAP, **ref.MODES[mode]
    )
    for number in range(4):
        ref.zero_grads("none", generator, slow_generator, our_critic, slow_critic)
        ref.seed(number)
        _adversarial_step(slow_generator, slow_critic, [])
        ref.seed(number)
        _adversarial_step(generator, our_critic, log)
        ref.assert_same(generator, slow_generator)
        ref.assert_same(our_critic, slow_critic)
    assert log
    ref.assert_in_step()


@ref.modes
def test_all_frozen_in_turn(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_adversarial, mode)


def _new_layer(net: nn.Module) -> None:
    net.second = nn.Linear(7, 7).double()


def _new_parameters(net: nn.Module) -> None:
    net.second.weight = nn.Parameter(net.second.weight.detach().clone())
    net.second.bias = nn.Parameter(net.second.bias.detach().clone())


def _assigned(net: nn.Module) -> None:
    state = {name: value.clone() for name, value in net.second.state_dict().items()}
    net.second.load_state_dict(state, assign=True)


def _added_layer(net: nn.Module) -> None:
    net.second = nn.Sequential(net.second, nn.Linear(7, 7).double())


def _added_parameter(net: nn.Module) -> None:
    """Behind all other parameters and layers."""
    net.third.register_parameter("scale", nn.Parameter(torch.ones(1).double()))


CHANGES = {
    _new_layer: SECOND,
    _new_parameters: SECOND,
    _assigned: SECOND,
    _added_layer: {"second.1.weight", "second.1.bias"},
    _added_parameter: {"third.scale"},
}
CHANGES_BY_NAME = {change.__name__.strip("_"): change for change in CHANGES}


def _check_replaced(change: str, mode: str) -> None:
    ours, slow = ref.make_pair(ref.Net, mode)
    ref.check_steps(ours, slow, ref.plain_step, 2)
    ref.zero_grads("none", ours, slow)
    make_change = CHANGES_BY_NAME[change]
    make_change(ours.module)
    # accepted, since functional_call does the same for the time of a forward
    loss = ref.loss_of(ours(ref.data()))
    ref.assert_names(ref.error_of(loss.backward), CHANGES[make_change], "wrap")
    module = ours.module
    module.zero_grad()
    again = ReducerDDP(module, bucket_cap_mb=ref.SMALL_CAP, **ref.MODES[mode])
    slow = ref.SlowDDP(copy.deepcopy(module))
    if change == "added_parameter":
        ref.assert_in_step()
        return
    ref.check_steps(again, slow, ref.plain_step)


@ref.modes
@pytest.mark.parametrize("change", CHANGES_BY_NAME)
def test_replaced_or_added(ranks, change, mode, world):
    """The start of the next backward names the parameter. Wrapping again works."""
    ref.on_ranks(ranks, world, _check_replaced, change, mode)


def _check_bypassed(cast: bool, mode: str) -> None:
    """A backward of a bypassed forward does not hide the change from the wrapper."""
    ours, _ = ref.make_pair(ref.Net, mode)
    if cast:
        ours.module.float()
    else:
        _added_parameter(ours.module)
    ref.loss_of(ours.module(ref.data().float() if cast else ref.data())).backward()

    def step() -> None:
        ref.loss_of(ours(ref.data())).backward()

    ref.assert_names(ref.error_of(step), {"first.weight"} if cast else {"third.scale"}, "wrap")


@ref.modes
@pytest.mark.parametrize("cast", [True, False], ids=["cast", "added"])
def test_changed_behind_a_bypassed_wrapper(ranks, cast, mode, world):
    ref.on_ranks(ranks, world, _check_bypassed, cast, mode)


def _check_cast(mode: str) -> None:
    for cast in (nn.Module.half, nn.Module.float):
        ours, slow = ref.make_pair(ref.Net, mode)
        ref.check_steps(ours, slow, ref.plain_step, 2)
        cast(ours.module)
        ref.assert_names(ref.error_of(ours, ref.data()), {"first.weight"}, "wrap")


@ref.modes
def test_cast(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_cast, mode)


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(20, 2)
        )


def _conv_step(model: nn.Module, number: int) -> None:
    ref.backward(model, ref.loss_of(model(ref.data(2, 3, 6, 6))))


def _cast_and_back(model: nn.Module) -> None:
    model.float()
    model.double()


def _channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def _contiguous(model: nn.Module) -> None:
    model.to(memory_format=torch.contiguous_format)


MOVES = {"cast and back": _cast_and_back, "channels last": _channels_last}


def _check_moved(move: str, mode: str) -> None:
    """First-order gradients are averaged.

    Each then holds a graph, unless ``grad`` is set to None.
    """
    for zero_style in ("none", "zeros"):
        ours, slow = ref.make_pair(ConvNet, mode)
        ref.check_steps(ours, slow, _conv_step, 1, zero_style)
        for model in (ours, slow):
            MOVES[move](model)
        ref.check_steps(ours, slow, _conv_step, 2, zero_style)
        for model in (ours, slow):
            _contiguous(model)
        ref.check_steps(ours, slow, _conv_step, 2, zero_style)


@ref.modes
@pytest.mark.parametrize("move", MOVES)
def test_moved(ranks, move, mode, world):
    ref.on_ranks(ranks, world, _check_moved, move, mode)


def _check_functional_call(mode: str) -> None:
    """With other tensors there is nothing to average. With the wrapped parameters there is."""
    ours, slow = ref.make_pair(ref.Net, mode)

    def with_own(model: nn.Module, number: int) -> None:
        own = dict(model.named_parameters())
        ref.backward(model, ref.loss_of(functional_call(model, own, (ref.data(),))))

    def with_functions_of_own(model: nn.Module, number: int) -> None:
        doubled = {name: 2 * param for name, param in model.named_parameters()}
        ref.backward(model, ref.loss_of(functional_call(model, doubled, (ref.data(),))))

    def with_others(requires_grad: bool, cls: type = torch.Tensor) -> None:
        others = {
            name: param.detach().clone().as_subclass(cls).requires_grad_(requires_grad)
            for name, param in ours.named_parameters()
        }
        loss = ref.loss_of(functional_call(ours, others, (ref.data(),)))
        if requires_grad:
            loss.backward()
            expected = {f"module.{n}": p.grad for n, p in local.named_parameters()}
            for name, tensor in others.items():
                torch.testing.assert_close(tensor.grad, expected[name], msg=name)

    for step in (ref.plain_step, with_own, with_functions_of_own):
        ref.check_steps(ours, slow, step, 2)
        ref.zero_grads("none", ours)
        ref.seed(5)
        local = copy.deepcopy(slow.module)
        local.zero_grad()
        ref.loss_of(local(ref.data())).backward()
        ref.seed(5)
        with_others(True)
        ref.seed(5)
        with_others(True, nn.Parameter)
        with_others(False)
        assert all(param.grad is None for param in ours.parameters())
    ref.check_steps(ours, slow, ref.plain_step)


def _check_hidden_outputs() -> None:
    """A replaced layer is reported at forward if no output can be watched."""
    model = ref.build_same(ref.Net)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            return iter([self.net(x)])

    ours = ReducerDDP(Hidden())
    _new_layer(model)
    ref.assert_names(
        ref.error_of(ours, ref.data()), {"net.second.weight", "net.second.bias"}, "wrap"
    )


def test_replaced_with_hidden_outputs(ranks):
    ref.on_ranks(ranks, 2, _check_hidden_outputs)


@ref.modes
def test_functional_call(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_functional_call, mode)


class _SomeParameters(ref.Net):
    """A library's module: parameters() has what the first optimizer trains."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.second.parameters(recurse)


def _check_overridden_parameters(change: str) -> None:
    grads = []
    for cls in (nn.parallel.DistributedDataParallel, ReducerDDP):
        torch.manual_seed(0)
        model = cls(_SomeParameters().double())
        if change == "another layer":
            model.module.activation = nn.GELU()
        for number in range(3):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            if change == "functional_call":
                params = {name: 2 * param for name, param in model.named_parameters()}
                output = functional_call(model, params, ref.data())
            else:
                output = model(ref.data())
            ref.loss_of(output).backward()
        grads.append([param.grad for _, param in model.named_parameters()])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("change", ["another layer", "functional_call"])
def test_a_module_with_its_own_parameters_method(ranks, change):
    ranks(2).run(_check_overridden_parameters, change)
