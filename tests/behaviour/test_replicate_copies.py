"""What copies, compiles or inspects a replicated module, and what is refused by name."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.swa_utils import AveragedModel

import ddpx
from ddpx.ddp.fronts.lookup import replica_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class OwnCopy(Net):
    """Copies itself in its own way."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        twin = OwnCopy.__new__(OwnCopy)
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


class OwnState(Net):
    """Pickles its weights alone."""

    def __getstate__(self) -> dict[str, Any]:
        return {"weights": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        assert state.keys() == {"weights"}, state.keys()
        self.__init__()
        self.load_state_dict(state["weights"])


def _x() -> torch.Tensor:
    return torch.randn(3, 4)


def _averages(module: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether all ranks have the same gradients after a step on different inputs."""
    module.zero_grad()
    torch.manual_seed(dist.get_rank())
    call(_x()).square().sum().backward()
    same = True
    for param in module.parameters():
        assert param.grad is not None
        first = param.grad.clone()
        dist.broadcast(first, 0)
        same &= torch.equal(first, param.grad)
    flag = torch.tensor(float(same))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


# ---- copies --------------------------------------------------------------------------------------


def _by_torch_save(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "pickle, protocol 2": lambda module: pickle.loads(pickle.dumps(module, 2)),
    "torch.save": _by_torch_save,
    "AveragedModel": lambda module: AveragedModel(module).module,
    "in another module": lambda module: copy.deepcopy(nn.Sequential(module))[0],
}


def _copies_are_plain(name: str) -> None:
    module = ddpx.replicate(Net())
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append(1))
    assert _averages(module, module)
    state = copy.deepcopy(module.state_dict())
    if "pickle" in name or "save" in name:  # a lambda cannot be pickled
        module._forward_pre_hooks.popitem()
    twin = COPIES[name](module)
    assert type(twin) is Net
    assert all(torch.equal(state[key], value) for key, value in twin.state_dict().items())
    assert not twin._forward_hooks and not twin._forward_hooks_always_called
    kept = len(module._forward_pre_hooks) - 1
    assert len(twin._forward_pre_hooks) == kept, "a hook of the user was lost"
    assert not twin._forward_pre_hooks_with_kwargs
    assert not _averages(twin, twin)
    assert _averages(module, module)
    torch.jit.script(copy.deepcopy(Net()))


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_plain(ranks, name):
    ranks(2).run(_copies_are_plain, name)


def _a_class_with_its_own_copy() -> None:
    module = ddpx.replicate(OwnCopy())
    twin = copy.deepcopy(module)
    assert not _averages(twin, twin)
    assert not twin._forward_hooks and not twin._forward_pre_hooks  # they have removed themselves
    assert _averages(module, module)
    del module
    assert OwnCopy not in copyreg.dispatch_table


def _a_class_with_its_own_state() -> None:
    module = ddpx.replicate(OwnState())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not twin._forward_hooks and not twin._forward_pre_hooks
        assert torch.equal(twin.first.weight, module.first.weight)


@pytest.mark.parametrize("check", [_a_class_with_its_own_copy, _a_class_with_its_own_state])
def test_a_class_of_its_own(ranks, check):
    ranks(2).run(check)


# ---- what calls or inspects the module ---------------------------------------------------------


def _compiled(place: str) -> None:
    module: Any = Net()
    if place == "in place":
        module.compile(backend="eager")
    if place == "before":
        module = torch.compile(module, backend="eager")
    call = module = ddpx.replicate(module)
    if place == "around":
        call = torch.compile(module, backend="eager", fullgraph=True)
    for _ in range(3):
        assert _averages(module, call)
    assert replica_of(call) is replica_of(module)


@pytest.mark.parametrize("place", ["around", "before", "in place"])
def test_compiled(ranks, place):
    ranks(2).run(_compiled, place)


def _functional_call() -> None:
    module = ddpx.replicate(Net())
    others = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    torch.func.functional_call(module, others, (_x(),)).sum().backward()
    assert all(param.grad is not None for param in others.values())
    assert all(param.grad is None for param in module.parameters())
    grads = torch.func.grad(lambda ps: torch.func.functional_call(module, ps, (_x(),)).sum())(
        {name: param.detach() for name, param in others.items()}
    )
    assert grads.keys() == others.keys()
    assert _averages(module, module)


def _checkpoints() -> None:
    module = ddpx.replicate(Net())
    optimizer = torch.optim.Adam(module.parameters())
    assert _averages(module, module)
    optimizer.step()
    state, of_optimizer = get_state_dict(module, optimizer)
    assert list(state) == list(Net().state_dict())
    assert set(of_optimizer["state"]) == set(state)
    set_model_state_dict(module, {name: torch.zeros_like(state[name]) for name in state})
    assert all(not param.any() for param in module.parameters())


def _traced() -> None:
    module = ddpx.replicate(Net())
    x = _x()
    assert torch.allclose(torch.jit.trace(module, x)(x), module(x))
    assert torch.allclose(torch.export.export(module, (x,)).module()(x), module(x))
    graph = torch.fx.symbolic_trace(module)
    assert not graph._forward_hooks
    assert torch.allclose(graph(x), module(x))


def _traced_by_one_rank() -> None:
    """A trace makes no collective call: not for buffers, and not for a rebuild that is due."""
    module = ddpx.replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    x = torch.randn(8, 4)
    for _ in range(3):
        if dist.get_rank() == 0:
            before = module[1].num_batches_tracked.clone()
            exported = torch.export.export(module, (x,)).module()
            assert module[1].num_batches_tracked == before
            traced = torch.jit.trace(module.eval(), x, check_trace=False)  # the check is a forward
            assert torch.allclose(traced(x), module.forward(x))
            module.train()
            assert torch.allclose(exported(x), module.forward(x))
        module(x).square().sum().backward()
    total = module[0].weight.grad.clone()
    dist.all_reduce(total)
    assert torch.allclose(total, 2 * module[0].weight.grad)


def _parametrized() -> None:
    """Other layers or parameters, as of PEFT: an error, until replicate() is called again."""
    module = ddpx.replicate(Net())
    torch.nn.utils.parametrizations.weight_norm(module.first)
    with pytest.raises(RuntimeError, match=r"2 new parameters: first\.par.*replicate\(model"):
        module(_x()).sum().backward()
    ddpx.replicate(module)
    assert _averages(module, module)


def _scripted() -> None:
    module = ddpx.replicate(Net())
    with pytest.raises(RuntimeError, match=r"cannot compile a module after ddpx\.replicate\(\)"):
        torch.jit.script(module)
    twin = torch.jit.script(copy.deepcopy(module))
    assert torch.allclose(twin(torch.ones(1, 4)), module(torch.ones(1, 4)))
    torch.jit.script(ddpx.unreplicate(module))


def _fsdp() -> None:
    module = ddpx.replicate(Net())
    fully_shard(module)
    with pytest.raises(RuntimeError, match=r"FSDP has taken the parameters.*two dimensions"):
        module(_x()).sum().backward()
    module = ddpx.replicate(Net())
    around = FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"FSDP has taken the parameters.*_flat_param"):
        around(_x()).sum().backward()
    sharded = fully_shard(Net())
    with pytest.raises(ValueError, match="already shards and reduces"):
        ddpx.replicate(sharded)


RUNS = {
    run.__name__.strip("_"): run
    for run in (
        _functional_call,
        _checkpoints,
        _traced,
        _traced_by_one_rank,
        _parametrized,
        _scripted,
        _fsdp,
    )
}


def _run(name: str) -> None:
    RUNS[name]()


@pytest.mark.parametrize("name", RUNS)
def test_run(ranks, name):
    ranks(2).run(_run, name)
