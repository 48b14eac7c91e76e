"""Names of derived classes and of wrapped modules never meet names of ddpx."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import WRAPPERS, Wrapper
from test_ddp_names import ATTRIBUTES, NEWER, REFUSED_ATTRIBUTES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import ReducerDDP
from ddpx.ddp import module as wrapper_module

FUNCTIONS = (
    "register_post_sync_hook",
    "reset",
    "set_check_finite",
    "set_requires_gradient_sync",
    "set_weight",
    "synchronized_grads",
    "bucket_plan",
    "plan_report",
    "wait_for_gradients",
)
# DDP keeps these attributes only in some modes.
SOMETIMES = {"_static_graph_delay_allreduce_enqueued", "buffer_hook", "device_mesh", "module"}


def _own_names() -> None:
    """An instance has the attributes of DDP, and one of ours. A class has the methods of DDP, and
    the listed functions."""
    models = [cls(nn.Linear(4, 2)) for cls in WRAPPERS]
    of_module = set(vars(nn.Linear(4, 2))) | set(dir(nn.Module))
    theirs, ours = (set(vars(model)) - of_module for model in models)
    only_ours = ours - theirs - ATTRIBUTES - NEWER - SOMETIMES
    assert only_ours == {"_ddpx"}, only_ours
    of_class = {name for name in dir(ReducerDDP) if not name.startswith("__")}
    known = theirs | set(dir(DistributedDataParallel)) | ATTRIBUTES | REFUSED_ATTRIBUTES | NEWER
    assert of_class - known - SOMETIMES == set(FUNCTIONS), of_class - known


def _private_names_of_ours() -> set[str]:
    """The names that ReducerDDP and its replica have or had, as a derived class may use them."""
    replica = vars(ReducerDDP(nn.Linear(4, 2))._ddpx)
    parts = {f"_{name}" for name in (*replica, *dir(ddpx.ddp.replica.replica.Replica))} - {"_"}
    return {name for name in parts if not name.startswith("__")}


def _collisions() -> None:
    """Each name is a method of the derived class, a class attribute, or an instance attribute."""
    names = _private_names_of_ours() - set(dir(DistributedDataParallel))
    names |= {"_comm_hook", "_options", "_transport", "_run", "_watch", "_attach", "_managed"}

    def train(cls: Any, kind: str) -> list[torch.Tensor]:
        def method(self: nn.Module, *args: Any) -> Any:
            raise AssertionError("a name of a derived class was called")

        in_class = dict.fromkeys(names, method if kind == "method" else "a text")
        derived = type("Derived", (cls,), {} if kind == "attribute of instance" else in_class)
        torch.manual_seed(0)
        model = derived(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        if kind == "attribute of instance":
            for name in sorted(names):
                setattr(model, name, "a text")
        for _ in range(3):
            model(torch.randn(6, 4)).square().sum().backward()
        with model.join():
            model(torch.randn(6, 4)).square().sum().backward()
        model._get_ddp_logging_data()
        twin = copy.deepcopy(model)
        twin(torch.randn(6, 4)).square().sum().backward()
        assert twin.module[0].weight.grad is not None
        return [param.grad.clone() for param in model.parameters()]

    for kind in ("method", "text of class", "attribute of instance"):
        for theirs, ours in zip(*(train(cls, kind) for cls in WRAPPERS), strict=True):
            assert torch.equal(theirs, ours), kind


def _hook_of_derived_class() -> None:
    """torchft's wrapper has a static method of the name ``_comm_hook``."""

    def make(cls: Any) -> Wrapper:
        class Derived(cls):  # type: ignore[misc]
            def __init__(self, module: nn.Module) -> None:
                super().__init__(module)
                self.register_comm_hook(None, self._comm_hook)

            @staticmethod
            def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads types
                future = torch.futures.Future()
                future.set_result(bucket.buffer() * 2)
                return future

        return Derived(nn.Linear(2, 2))

    for cls in WRAPPERS:
        model = make(cls)
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((2, 2), 2.0))


def _without_ddps_constructor() -> None:
    """mmengine's wrapper of several wrappers derives from DDP, and leaves out DDP's constructor."""
    for cls in WRAPPERS:

        class Several(cls):  # type: ignore[misc, valid-type]
            def __init__(self, module: nn.Module) -> None:
                super(cls, self).__init__()  # noqa: B023
                self.module = module
                module.first = cls(module.first)  # noqa: B023

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.module.first(x)

        model = Several(nn.ModuleDict({"first": nn.Linear(4, 2)}))
        model(torch.ones(3, 4)).sum().backward()
        assert model.module.first.module.weight.grad is not None
        assert "module.first.module.weight" in model.state_dict()


class Busy(nn.Linear):
    """A module with each name that ddpx adds."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.called: list[str] = []
        for name in FUNCTIONS:
            self.__dict__[name] = lambda *args, name=name: self.called.append(name)


def _passes_through() -> None:
    """Two usual ways to pass attributes through. The module's own methods run, as with DDP."""
    for cls in WRAPPERS:

        class Fallback(cls):  # type: ignore[misc, valid-type]
            def __getattr__(self, name: str) -> Any:
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(super().__getattr__("module"), name)

        class Asks(cls):  # type: ignore[misc, valid-type]
            def __getattr__(self, name: str) -> Any:
                if name == "module":
                    return super().__getattr__(name)
                module = super().__getattr__("module")
                return getattr(module, name) if hasattr(module, name) else super().__getattr__(name)

        for derived in (Fallback, Asks):
            module = Busy()
            model = derived(module)
            model(torch.ones(3, 4)).sum().backward()
            for name in FUNCTIONS:
                getattr(model, name)(1)
            assert module.called == list(FUNCTIONS)
            if cls is ReducerDDP:
                ddpx.set_requires_gradient_sync(model, False)
                assert not model.require_backward_grad_sync
    plain = ReducerDDP(Busy())
    with pytest.raises(AttributeError, match="has no attribute 'reset'"):
        plain.reset()  # as with DDP
    assert not hasattr(plain, "reset")


class _Computed(nn.Linear):
    """A module with a property that is not ready yet."""

    def __init__(self) -> None:
        super().__init__(4, 2)

    @property
    def bucket_plan(self) -> str:
        raise RuntimeError("fit the tokenizer first")


def _property_that_raises() -> None:
    for cls in WRAPPERS:
        assert not hasattr(cls(_Computed()), "bucket_plan")


def _functions() -> None:
    model = ReducerDDP(nn.Linear(4, 2))
    around = nn.Sequential(model)
    for wrapped in (model, around):
        ddpx.reset(wrapped)
        ddpx.set_check_finite(wrapped)
        ddpx.set_check_finite(wrapped, False)
        ddpx.set_requires_gradient_sync(wrapped, True)
        seen: list[torch.Tensor] = []
        handle = ddpx.register_post_sync_hook(wrapped, model.module.weight, seen.append)
        wrapped(torch.ones(3, 4)).sum().backward()
        assert len(seen) == 1
        handle.remove()
        (grad,) = ddpx.synchronized_grads(
            wrapped, wrapped(torch.ones(3, 4)).sum(), [model.module.weight]
        )
        assert torch.equal(grad, torch.full((2, 4), 3.0))
    two = nn.Sequential(model, ReducerDDP(nn.Linear(2, 2)))
    for wrong, number in ((nn.Linear(4, 2), "none"), (3, "none"), (two, "2")):
        with pytest.raises(TypeError, match=f"expected one ReducerDDP.* contains {number}"):
            ddpx.reset(wrong)  # type: ignore[arg-type]


def _assignments() -> None:
    """What scripts assign: the group, as in DDP, and the module."""
    group = dist.group.WORLD
    for cls in WRAPPERS:
        model = cls(nn.Linear(4, 2))
        model.process_group = group
        assert model.process_group is group
        model.module = torch.nn.Sequential(model.module)
        model(torch.ones(3, 4)).sum().backward()
        assert model.module[0].weight.grad is not None
        twin = copy.deepcopy(model)
        twin(torch.ones(3, 4)).sum().backward()
        assert twin.module[0].weight.grad is not None


def _pickles() -> None:
    def saved() -> bytes:
        model = ReducerDDP(nn.Linear(4, 2))
        file = io.BytesIO()
        torch.save(model, file)
        return file.getvalue()

    own = saved()
    with ddpx.patch_ddp():
        replaced = saved()
        assert b"ReducerDDP" not in pickle.dumps(type(ReducerDDP(nn.Linear(4, 2))))
        for data in (own, replaced):
            assert type(torch.load(io.BytesIO(data), weights_only=False)) is ReducerDDP
    for data in (own, replaced):
        model = torch.load(io.BytesIO(data), weights_only=False)
        assert type(model) is ReducerDDP
        model(torch.ones(3, 4)).sum().backward()


class Further(ReducerDDP):
    pass


def _class_names() -> None:
    def names(cls: type) -> tuple[str, str, str]:
        return cls.__name__, cls.__qualname__, cls.__module__

    own = names(ReducerDDP), names(Further)
    with ddpx.patch_ddp():
        name = "DistributedDataParallel"
        assert names(ReducerDDP) == (name, name, "ddpx.ddp.module")
        assert names(Further) == own[1]
        assert repr(ReducerDDP(nn.Linear(4, 2))).startswith(f"{name}(\n  ddpx, rank 0 of 1")
        assert wrapper_module.DistributedDataParallel is ReducerDDP
    assert (names(ReducerDDP), names(Further)) == own
    with ddpx.patch_ddp(Further):
        assert names(Further)[:2] == (name, name)
        assert names(ReducerDDP) == own[0]
        assert pickle.loads(pickle.dumps(Further)) is Further
    assert (names(ReducerDDP), names(Further)) == own
    assert pickle.loads(pickle.dumps(Further)) is Further


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(_own_names, marks=pytest.mark.wrapper_only),
        _collisions,
        _hook_of_derived_class,
        _without_ddps_constructor,
        pytest.param(_passes_through, marks=pytest.mark.wrapper_only),
        pytest.param(_property_that_raises, marks=pytest.mark.wrapper_only),
        _functions,
        pytest.param(_assignments, marks=pytest.mark.wrapper_only),
        _pickles,
        _class_names,
    ],
)
def test_names(ranks, check):
    ranks(1).run(check)
