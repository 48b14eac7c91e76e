"""Join contexts: flags, the end of a context, and what peers see of ranks without inputs."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from both_wrappers import (
    SMALL_CAP,
    WRAPPERS,
    Mlp,
    Normed,
    assert_same_on_all_ranks,
    mlp_step,
)

from ddpx import ReducerDDP, peer_status


def _check_late_end_of_an_earlier_context() -> None:
    """A traceback kept the earlier context alive. Its end does not end the context after it."""
    model = ReducerDDP(Mlp(), **SMALL_CAP)
    kept: list[BaseException] = []
    try:
        with model.join(throw_on_early_termination=True):
            for _ in range(1 + dist.get_rank()):
                mlp_step(model)
    except RuntimeError as error:
        kept.append(error)
    assert kept
    with pytest.raises(RuntimeError, match=r"join\(\)"), model.join():
        kept.clear()
        gc.collect()
        loss = model(torch.randn(6, 16)).square().mean()
        with model.no_sync():
            loss.backward()


def test_late_end_of_an_earlier_context(ranks):
    ranks(2).run(_check_late_end_of_an_earlier_context, timeout=30.0)


class _Watching(ReducerDDP):
    """Rank 0 looks at rank 1 before it sends its buffers."""

    seen = ""

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if dist.get_rank() == 0:
            time.sleep(0.3)
            self.seen = peer_status(self)[1].doing or ""
        super()._sync_module_buffers(authoritative_rank)


def _joined_rank_waits_for_buffers() -> str:
    model = _Watching(Normed())
    with model.join():
        for _ in range(2 - dist.get_rank()):
            mlp_step(model)
    return model.seen


def test_a_rank_without_inputs_waits_for_buffers(ranks):
    assert "buffers" in ranks(2).run(_joined_rank_waits_for_buffers)[0]


def _check_throw() -> None:
    """All ranks raise as soon as one rank runs out of inputs."""
    for cls in WRAPPERS:
        model = cls(Mlp())
        num_steps = 0
        with (
            pytest.raises(RuntimeError, match="exhaust"),
            model.join(throw_on_early_termination=True),
        ):
            for _ in range(6 if dist.get_rank() == 0 else 2):
                mlp_step(model)
                num_steps += 1
        assert num_steps == 2
        dist.barrier()


def test_throw_on_early_termination(ranks):
    ranks(2).run(_check_throw)


def _check_disabled() -> None:
    model = ReducerDDP(Mlp())
    assert model._get_ddp_logging_data()["join_uneven_inputs"] == 0
    with model.join(enable=False):
        for number in range(3):
            torch.manual_seed(10 * number + dist.get_rank())
            mlp_step(model)
            assert_same_on_all_ranks(model.module.first.weight.grad)
    with model.join():
        mlp_step(model)
    assert model._get_ddp_logging_data()["join_uneven_inputs"] == 1


def test_disabled_join_does_nothing(ranks):
    ranks(2).run(_check_disabled)


def _check_final_model(broadcast_buffers: bool) -> None:
    """Rank 0 runs out of inputs first. Buffers are those of the last rank, if they are sent."""
    states = []
    for cls in WRAPPERS:
        torch.manual_seed(0)
        model = cls(Normed(), broadcast_buffers=broadcast_buffers)
        torch.manual_seed(dist.get_rank())
        with model.join():
            for number in range(1 + dist.get_rank()):
                mlp_step(model, number)
        assert model._authoritative_rank == dist.get_world_size() - 1
        with pytest.raises(ValueError, match="rank_cond"):
            model._find_common_rank(dist.get_rank(), False)
        states.append(model.state_dict())
        if broadcast_buffers:
            assert_same_on_all_ranks(*model.buffers())
        else:
            assert model.module.norm.num_batches_tracked == 1 + dist.get_rank()
    for name, expected in states[0].items():
        assert torch.equal(states[1][name], expected), name


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_final_model(ranks, broadcast_buffers):
    ranks(3).run(_check_final_model, broadcast_buffers)
