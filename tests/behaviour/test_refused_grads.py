"""A gradient that cannot be averaged is refused by name. Other gradients are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grad_kinds import WORLD_SIZE, Closed, Given, Kind, dense, wrong_grads
from slow_ddp import assert_in_step, error_of

from ddpx import ReducerDDP

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "batched, views": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
}


@dataclass(frozen=True)
class Refused:
    """A kind of gradient that is refused, and words of the error."""

    kind: Kind
    words: tuple[str, ...]


def _fake(values: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(values)


def _of_vmap(values: torch.Tensor) -> torch.Tensor:
    return torch._C._functorch._add_batch_dim(values.expand(2, *values.shape), 0, 1)


def _from_dense(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


REFUSED = {
    "sparse": Refused(
        Kind(torch.Tensor.to_sparse),
        ("a sparse Float tensor of shape [3, 4]", "Pass sparse=False."),
    ),
    "sparse by user": Refused(
        Kind(torch.Tensor.to_sparse, by_user=True), ("a sparse Float tensor of shape [3, 4]",)
    ),
    "dense": Refused(
        Kind(_from_dense, sparse=True),
        (
            "a dense Float tensor",
            "for a sparse gradient",
            "Expected variable to have sparse gradient.",  # DDP's words
        ),
    ),
    "fake": Refused(Kind(_fake, by_user=True), ("without values",)),
    "of vmap": Refused(Kind(_of_vmap, by_user=True), ("without values",)),
    "unreadable subclass": Refused(
        Kind(Closed, by_user=True), ("a subclass of torch.Tensor", "Closed has no aten.copy_")
    ),
}


class _Turns(Given):
    """The gradient of ``odd`` is refused on rank 0 in some steps. Otherwise it is plain."""

    def __init__(self, refused: Kind) -> None:
        self.refused = refused
        self.bad = False
        super().__init__({"odd": Kind(self._make, sparse=refused.sparse, by_user=refused.by_user)})

    def _make(self, values: torch.Tensor) -> torch.Tensor:
        if self.bad:
            return self.refused.make(values)
        return values.to_sparse(1) if self.refused.sparse else values.clone()

    def record(self, name: str, grad: torch.Tensor) -> None:
        if not (self.bad and name == "odd"):
            super().record(name, grad)


def _check(name: str, mode: str, transport: str, bad_step: int) -> None:
    refused = REFUSED[name]
    module = _Turns(refused.kind)
    model = ReducerDDP(module, bucket_cap_mb=0.0001, transport=transport, **MODES[mode])
    for step in range(4):
        model.zero_grad()
        module.bad = dist.get_rank() == 0 and step == bad_step
        module.number = step
        module.clear()
        text = error_of(lambda: model(torch.ones(1)).backward())
        if module.bad:
            missing = [word for word in ("parameter 'odd", *refused.words) if word not in text]
            assert not missing, f"{missing} not in {text!r}"
        else:
            assert not text
        found = wrong_grads(module, skipped=("odd",) if module.bad else ())
        assert not found, f"step {step}: " + "\n".join(found)
    assert_in_step()


@pytest.mark.parametrize("bad_step", [0, 2])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", ["group", "shm"])
def test_refused_by_name(ranks, transport, mode, name, bad_step):
    ranks(WORLD_SIZE).run(_check, name, mode, transport, bad_step)


def _check_shared(mode: str) -> None:
    """The script gives a parameter the memory of another gradient."""
    module = Given({"odd": Kind(torch.clone)})
    model = ReducerDDP(module, **MODES[mode])
    for step in range(3):  # a static graph rebuilds its buckets in the third
        module.number = step
        model(torch.ones(1)).backward()
    module.named()["odd"].grad = module.named()["first"].grad
    text = error_of(lambda: model(torch.ones(1)).backward())
    assert "parameter 'odd' is a dense Float tensor" in text, text
    assert "in the memory of the gradient of another parameter" in text
    model.zero_grad()
    module.clear()
    model(torch.ones(1)).backward()
    found = wrong_grads(module)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "views" in mode])
def test_memory_of_another_gradient_is_refused(ranks, mode):
    ranks(WORLD_SIZE).run(_check_shared, mode)


def _check_view_of_own(mode: str) -> None:
    """Between steps, the script replaces gradients by views of them with other values."""
    views = {"square": torch.t, "complex": torch.conj}
    module = Given(
        {
            "square": Kind(torch.clone, shape=(3, 3)),
            "complex": Kind(torch.clone, complex=True),
        }
    )
    model = ReducerDDP(module, **MODES[mode])
    params = module.named()
    for step in range(5):
        module.number = step
        module.clear()
        before = {n: dense(p.grad) for n, p in params.items() if p.grad is not None}
        model(torch.ones(1)).backward()
        found = wrong_grads(module, {n: v + before.get(n, 0) for n, v in module.local.items()})
        assert not found, f"step {step}: " + "\n".join(found)
        for name, view in views.items():
            params[name].grad = view(params[name].grad)


@pytest.mark.parametrize("mode", MODES)
def test_view_of_own_gradient_counts_by_its_values(ranks, mode):
    ranks(WORLD_SIZE).run(_check_view_of_own, mode)
