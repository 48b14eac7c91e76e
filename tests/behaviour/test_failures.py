"""Errors name their cause, and the reducer can be used again after them."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from fake_groups import BreakableGroup
from modes import MODES
from reference import assert_grads_averaged, average_grads, copy_from_rank_0
from torch import nn

from ddpx import ReducerDDP
from ddpx._C import Phase


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)
        self.spare = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, use_spare: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        output = self.head(hidden)
        return output + self.spare(hidden) if use_spare else output


def _good_step(model: nn.Module) -> None:
    model(torch.ones(3, 8) * (dist.get_rank() + 1)).square().mean().backward()


def _wrapped_and_plain(options: dict) -> tuple[ReducerDDP, nn.Module]:
    module = TwoHeads()
    plain = copy_from_rank_0(module)
    return ReducerDDP(module, bucket_cap_mb=0.0005, **options), plain


def _assert_works(ours: ReducerDDP, plain: nn.Module) -> None:
    for _ in range(3):
        for model in (ours, plain):
            model.zero_grad()
        _good_step(ours)
        assert_grads_averaged(ours, plain, _good_step)
    assert ours.reducer.phase == Phase.IDLE


def _error_of(function, *args, **kwargs) -> str:
    with pytest.raises(RuntimeError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def _exception_in_backward(mode: str, when: int) -> None:
    """User code raises on every rank after some gradients have arrived."""
    ours, plain = _wrapped_and_plain(MODES[mode])
    for _ in range(when):
        _good_step(ours)

    def explode(grad: torch.Tensor) -> None:
        raise RuntimeError("user code failed")

    handle = ours.module.trunk.weight.register_hook(explode)
    assert "user code failed" in _error_of(_good_step, ours)
    assert ours.reducer.phase == Phase.IDLE
    handle.remove()
    _assert_works(ours, plain)


@pytest.mark.parametrize("when", [0, 1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_usable_after_exception_in_backward(ranks, world_size, mode, when):
    ranks(world_size).run(_exception_in_backward, mode, when)


def _unused_on_one_rank(mode: str) -> None:
    """The rank raises an error in the same backward. Its peer gets the mean and continues."""
    ours, plain = _wrapped_and_plain(MODES[mode])
    _good_step(ours)
    ours.zero_grad()
    rank = dist.get_rank()
    x = torch.ones(3, 8) * (rank + 1)

    def step(model: nn.Module) -> None:
        model(x, use_spare=rank == 0).square().mean().backward()

    if rank == 0:
        step(ours)
    else:
        text = _error_of(step, ours)
        assert "[ddpx rank 1, step 1, phase end of backward]" in text
        assert "2 parameters got no gradient in this backward: 'spare.weight', 'spare.bias'" in text
        assert "find_unused_parameters=True" in text
    plain.zero_grad()
    assert_grads_averaged(ours, plain, step)
    _assert_works(ours, plain)


@pytest.mark.parametrize("mode", ["default", "view"])
def test_unused_param_is_named_by_the_same_backward(ranks, mode):
    ranks(2).run(_unused_on_one_rank, mode)


def _static_graph_changes() -> None:
    ours, plain = _wrapped_and_plain(MODES["static"])
    for _ in range(2):
        _good_step(ours)
    text = _error_of(lambda: ours(torch.ones(3, 8), use_spare=False).sum().backward())
    assert re.search(r"static_graph=True.*'spare\.weight', 'spare\.bias'", text)
    _assert_works(ours, plain)


def test_changed_static_graph_is_named(ranks):
    ranks(2).run(_static_graph_changes)


def _layer_in_two_reentrant_checkpoints(mode: str) -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
            return checkpoint(self.layer, x, use_reentrant=True)

    module = Twice()
    plain = copy_from_rank_0(module)
    ours = ReducerDDP(module, **MODES[mode])

    def step(model: nn.Module) -> None:
        model(torch.ones(2, 8) * (dist.get_rank() + 1)).square().mean().backward()

    for _ in range(4):
        ours.zero_grad()
        plain.zero_grad()
        step(ours)
        assert_grads_averaged(ours, plain, step)


@pytest.mark.parametrize("mode", MODES)
def test_layer_in_two_reentrant_checkpoints(ranks, mode):
    ranks(2).run(_layer_in_two_reentrant_checkpoints, mode)


def _communication_fails() -> None:
    group = BreakableGroup([])
    ours = ReducerDDP(TwoHeads(), process_group=group, init_sync=False, bucket_cap_mb=0.0005)
    plain = copy_from_rank_0(ours.module)
    ours.module.load_state_dict(plain.state_dict())
    for _ in range(2):
        _good_step(ours)
    group.broken = True
    text = _error_of(_good_step, ours)
    rank = dist.get_rank()
    assert (
        f"[ddpx rank {rank}, step 2, phase end of backward] the all-reduce of bucket 0 ('" in text
    )
    assert "the cable is cut" in text
    group.broken = False
    _assert_works(ours, plain)


def test_failed_communication_names_bucket_and_params(ranks):
    ranks(2).run(_communication_fails)


class FunctionalEmbedding(nn.Module):
    """An embedding with sparse gradients that is not an nn.Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.table, sparse=True)


def _gradient_does_not_fit() -> None:
    ours = ReducerDDP(FunctionalEmbedding())
    text = _error_of(lambda: ours(torch.arange(3)).sum().backward())
    assert re.search(r"gradient of parameter 'table' is a sparse .* made for a dense", text)


def test_gradient_that_does_not_fit_is_named(ranks):
    ranks(2).run(_gradient_does_not_fit)


def _raise_late(model: nn.Module, raises: bool, use_spare: bool = True) -> None:
    """The rank ``raises`` fails after all its buckets were launched.

    Its peer has a complete step.
    """
    x = (torch.ones(3, 8) * (dist.get_rank() + 1)).requires_grad_() * 1.0

    def raise_in_backward(grad: torch.Tensor) -> None:
        if raises:
            raise RuntimeError("user code failed")

    x.register_hook(raise_in_backward)
    loss = model(x, use_spare=use_spare).square().mean()
    if raises:
        assert "user code failed" in _error_of(loss.backward)
    else:
        loss.backward()


def _late_exception_on_one_rank(mode: str, when: int) -> None:
    ours, plain = _wrapped_and_plain(MODES[mode])
    for _ in range(when):
        _good_step(ours)
    _raise_late(ours, dist.get_rank() == 1)
    _assert_works(ours, plain)


@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_late_exception_on_one_rank(ranks, mode, when):
    ranks(2).run(_late_exception_on_one_rank, mode, when)


def _static_graph_after_a_late_exception(mode: str) -> None:
    """A graph made static after a failed step ignores what ranks agreed on in that step."""
    ours, plain = _wrapped_and_plain(MODES[mode])
    _raise_late(ours, True)
    ours._set_static_graph()
    _assert_works(ours, plain)


@pytest.mark.parametrize("mode", ["default", "find unused"])
def test_static_graph_after_a_late_exception(ranks, mode):
    ranks(2).run(_static_graph_after_a_late_exception, mode)


def _late_exception_beside_unused_params(peer_uses_spare: bool) -> None:
    """The rank that raised still agrees with its peer on used parameters."""
    ours, plain = _wrapped_and_plain(MODES["find unused"])
    rank = dist.get_rank()

    def step(model: nn.Module, use_spare: bool) -> None:
        model(torch.ones(3, 8) * (rank + 1), use_spare).square().mean().backward()

    for _ in range(2):
        step(ours, False)
    _raise_late(ours, rank == 1, use_spare=peer_uses_spare and rank == 0)
    for use_spare in (rank == 0, False, rank == 1):
        ours.zero_grad()
        plain.zero_grad()
        step(ours, use_spare)
        step(plain, use_spare)
        average_grads(plain)
        for ours_, plain_ in zip(ours.parameters(), plain.parameters(), strict=True):
            grad = torch.zeros_like(plain_) if ours_.grad is None else ours_.grad
            torch.testing.assert_close(grad, plain_.grad)
    _assert_works(ours, plain)


@pytest.mark.parametrize("peer_uses_spare", [True, False])
def test_late_exception_beside_unused_params(ranks, peer_uses_spare):
    ranks(2).run(_late_exception_beside_unused_params, peer_uses_spare)


def _one_of_two_wrappers_fails() -> None:
    """Both wrappers end with the same backward.

    An error of the first must not stop the second's step.
    """
    failing, _ = _wrapped_and_plain({})
    other, plain = _wrapped_and_plain({})
    x = torch.ones(3, 8) * (dist.get_rank() + 1)
    text = _error_of((failing(x, use_spare=False).mean() + other(x).square().mean()).backward)
    assert "'spare.weight'" in text
    assert_grads_averaged(other, plain, _good_step)
    _assert_works(other, plain)


def test_one_of_two_wrappers_fails(ranks):
    ranks(2).run(_one_of_two_wrappers_fails)
