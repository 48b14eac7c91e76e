"""A module without a wrapper: what hooks of ddpx.replicate() do in all kinds of forwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import assert_grads_averaged, copy_from_rank_0
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import ReducerDDP
from ddpx.ddp.fronts import forward_hooks
from ddpx.ddp.fronts.lookup import replica_of
from ddpx.ddp.replica import ownership


class Net(nn.Module):
    """Has another method than forward, a buffer, and a forward that can raise or call itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)

    def forward(
        self, x: torch.Tensor, *, depth: int = 0, error: type[BaseException] | None = None
    ) -> torch.Tensor:
        if error is not None:
            raise error("in forward")
        if depth:
            x = self(x, depth=depth - 1)
        return self.second(torch.tanh(self.norm(self.first(x))))

    def generate_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).square().mean()


def _x() -> torch.Tensor:
    return torch.randn(6, 4)


def _train_as_plain(module: nn.Module, run: Callable[[nn.Module], None], steps: int = 3) -> None:
    """Checks that gradients of ``module`` are those of one process for all ranks."""
    plain = copy_from_rank_0(module)
    for step in range(steps):
        seed = 1000 * dist.get_rank() + step
        for model in (module, plain):
            model.zero_grad()
        torch.manual_seed(seed)
        run(module)
        torch.manual_seed(seed)
        assert_grads_averaged(module, plain, run)


def _nothing_is_left() -> None:
    assert DistributedDataParallel._active_ddp_module is None
    assert ownership.forwards.running == []
    assert forward_hooks._running.calls == []


# ---- usages --------------------------------------------------------------------------------------


def _forward(module: nn.Module) -> None:
    module(_x()).square().mean().backward()


def _another_method(module: nn.Module) -> None:
    module.generate_loss(_x()).backward()


def _a_submodule(module: nn.Module) -> None:
    module.second(module.norm(module.first(_x()))).square().mean().backward()


def _calls_itself(module: nn.Module) -> None:
    module(_x(), depth=2).square().mean().backward()


def _after_an_error(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="in forward"):
        module(_x(), error=ValueError)
    _nothing_is_left()
    _forward(module)


def _after_an_interrupt(module: nn.Module) -> None:
    """No hook runs after such an exception."""
    with pytest.raises(KeyboardInterrupt):
        module(_x(), error=KeyboardInterrupt)
    _forward(module)


def _while_an_error_is_handled(module: nn.Module) -> None:
    try:
        raise KeyError
    except KeyError:
        _forward(module)


def _after_an_error_of_another_hook(module: nn.Module) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("in a hook")

    for register in (module.register_forward_pre_hook, module.register_forward_hook):
        for prepend in (False, True):
            handle = register(refuse, prepend=prepend)
            with pytest.raises(ValueError, match="in a hook"):
                module(_x())
            handle.remove()
            _nothing_is_left()
    _forward(module)


USAGES = {
    run.__name__.strip("_"): run
    for run in (
        _forward,
        _another_method,
        _a_submodule,
        _calls_itself,
        _after_an_error,
        _after_an_interrupt,
        _while_an_error_is_handled,
        _after_an_error_of_another_hook,
    )
}


def _usage(name: str) -> None:
    module = ddpx.replicate(Net(), forward_sync_buffers=False)
    _train_as_plain(module, USAGES[name])
    _nothing_is_left()


@pytest.mark.parametrize("name", USAGES)
def test_usage(ranks, name):
    ranks(2).run(_usage, name)


LOW = torch.nn.parallel.distributed._MixedPrecision(
    param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
)


def _interrupted_in_mixed_precision() -> None:
    """The next forward puts the parameters back."""
    module = ddpx.replicate(Net(), mixed_precision=LOW, forward_sync_buffers=False)
    params = dict(module.named_parameters())
    with pytest.raises(KeyboardInterrupt):
        module(_x(), error=KeyboardInterrupt)
    for _ in range(2):
        _forward(module)
    after = dict(module.named_parameters())
    assert after.keys() == params.keys()
    assert all(after[name] is param for name, param in params.items())


def test_interrupted_in_mixed_precision(ranks):
    ranks(2).run(_interrupted_in_mixed_precision)


def _traceback_of_an_error() -> None:
    """The traceback ends where the module has raised."""
    for precision in (None, LOW):
        module = ddpx.replicate(Net(), mixed_precision=precision, forward_sync_buffers=False)
        with pytest.raises(ValueError) as caught:
            module(_x(), error=ValueError)
        code = caught.traceback[-1].frame.code.raw
        assert code is Net.forward.__code__, code


def test_traceback_of_an_error(ranks):
    ranks(2).run(_traceback_of_an_error)


def _on_threads() -> None:
    """Forwards on several threads at once have nothing in common."""
    module = ddpx.replicate(Net().eval(), forward_sync_buffers=False)
    expected = module(torch.ones(2, 4))
    wrong = []

    def call() -> None:
        for depth in range(40):
            with torch.no_grad():
                found = module(torch.ones(2, 4), depth=0 if depth % 2 else 1)
            if depth % 2 and not torch.equal(found, expected):
                wrong.append(depth)
        if ownership.forwards.running or forward_hooks._running.calls:
            wrong.append(-1)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    _train_as_plain(module.train(), _forward)


def test_on_threads(ranks):
    ranks(2).run(_on_threads)


# ---- the module stays what it is ---------------------------------------------------------------


def _is_unchanged() -> None:
    module = Net()
    attributes, names, state = (
        set(vars(module)),
        [name for name, _ in module.named_modules()],
        list(module.state_dict()),
    )
    assert ddpx.replicate(module) is module
    _forward(module)
    assert type(module) is Net
    assert set(vars(module)) == attributes
    assert [name for name, _ in module.named_modules()] == names
    assert list(module.state_dict()) == state
    assert repr(module) == repr(Net())


def test_module_is_unchanged(ranks):
    ranks(2).run(_is_unchanged)


def _broadcasts_buffers() -> None:
    module = ddpx.replicate(Net())
    assert ddpx.will_sync_module_buffers(module)
    for _ in range(2):
        _forward(module)
    module(_x())  # the start of a forward gives all ranks the buffers of rank 0
    ddpx.set_forward_sync_buffers(module, False)
    assert not ddpx.will_sync_module_buffers(module)


def test_buffers(ranks):
    ranks(2).run(_broadcasts_buffers)


# ---- lifetime ------------------------------------------------------------------------------------


def _ends_with_the_module() -> None:
    gc.collect()
    gc.disable()
    try:
        module = ddpx.replicate(Net(), mixed_precision=None)
        _forward(module)
        with suppress(ValueError):
            module(_x(), error=ValueError)
        replica, there = weakref.ref(replica_of(module)), weakref.ref(module)
        del module
        assert there() is None
        assert replica() is None
    finally:
        gc.enable()


def test_ends_with_the_module(ranks):
    """By reference counts alone, as a wrapper: buckets hold memory of the size of gradients."""
    ranks(2).run(_ends_with_the_module)


def _again_and_end() -> None:
    module = ddpx.replicate(Net(), forward_sync_buffers=False)
    _forward(module)
    ddpx.replicate(module, average="sum", forward_sync_buffers=False)
    assert replica_of(module).options.average == "sum"
    assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
    module.zero_grad()
    module.first.bias.square().sum().backward()
    sums = module.first.bias.grad.clone()
    assert torch.allclose(sums, 4 * module.first.bias.detach())
    assert ddpx.unreplicate(module) is module
    assert not module._forward_pre_hooks and not module._forward_hooks
    module.zero_grad()
    (module.first.bias.square().sum() * (1 + dist.get_rank())).backward()
    local = 2 * (1 + dist.get_rank()) * module.first.bias.detach()
    assert torch.allclose(module.first.bias.grad, local)
    with pytest.raises(TypeError, match=r"a Net that ddpx\.replicate\(\) does not average"):
        ddpx.unreplicate(module)


def test_again_and_end(ranks):
    ranks(2).run(_again_and_end)


def _beside_a_wrapper() -> None:
    """A wrapper around a replicated module: the one whose forward ran last averages."""
    module = ddpx.replicate(Net(), forward_sync_buffers=False)
    wrapper = ReducerDDP(module, forward_sync_buffers=False)
    _train_as_plain(module, lambda m: _forward(wrapper if m is module else m))
    _train_as_plain(module, _forward)
    ddpx.reset(wrapper)  # of the wrapper itself
    with pytest.raises(TypeError, match=r"or replicated module, .* contains 2"):
        ddpx.reset(nn.Sequential(wrapper))


def test_beside_a_wrapper(ranks):
    ranks(2).run(_beside_a_wrapper)


# ---- what is refused -----------------------------------------------------------------------------


def _refused() -> None:
    module = Net()
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, but got int"):
        ddpx.replicate(1)
    with pytest.raises(TypeError, match=r"got a ReducerDDP, which averages.*model\.module"):
        ddpx.replicate(ReducerDDP(module))
    with pytest.raises(TypeError, match=r"TorchScript has compiled.*ReducerDDP"):
        ddpx.replicate(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        ddpx.replicate(module, no_option=True)
    assert not module._forward_hooks and not module._forward_pre_hooks
    replicated = ddpx.replicate(Net())
    replicated.first = nn.Linear(4, 8)
    with pytest.raises(RuntimeError, match=r"the replicated module now has 2 new.* again"):
        _forward(replicated)


def test_refused(ranks):
    ranks(2).run(_refused)


def _unreplicate_within_a_step() -> None:
    rank = dist.get_rank()
    module = ddpx.replicate(nn.Linear(1, 1, bias=False))
    ddpx.set_manual_finalization(module, True)
    inputs = torch.full((1, 1), 1.0 + rank)
    output = module(inputs)
    output.register_hook(lambda _: ddpx.unreplicate(module))
    with pytest.raises(RuntimeError, match="hooks cannot be removed while a backward runs"):
        output.backward()
    for _ in range(2):
        module.zero_grad()
        module(inputs).backward()
        with pytest.raises(RuntimeError, match=r"Call finalize_backward\(\)"):
            ddpx.unreplicate(module)
        ddpx.finalize_backward(module)
        assert module.weight.grad.item() == 1.5
    ddpx.unreplicate(module)
    module.zero_grad()
    module(inputs).backward()
    assert module.weight.grad.item() == 1.0 + rank


def test_unreplicate_within_a_step(ranks):
    """The call raises an error, and the module is averaged as before."""
    ranks(2).run(_unreplicate_within_a_step)


def _fault_of_one_rank() -> None:
    module = Net()
    kind = "such" if dist.get_rank() == 1 else "mean"
    with pytest.raises(ValueError, match="such"):
        ddpx.replicate(module, average=kind)
    assert not module._forward_hooks


def test_fault_of_one_rank(ranks):
    ranks(2).run(_fault_of_one_rank)
