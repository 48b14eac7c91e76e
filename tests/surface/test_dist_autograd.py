"""``torch.distributed.autograd`` with wrapped modules: torch's own tests, and further usages.

A backward of ``torch.distributed.autograd`` accumulates gradients in a map of its context.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from both_wrappers import SMALL_CAP, WRAPPERS, Mlp, Wrapper
from modes import MODES
from new_ranks import run_in_new_ranks
from torch import nn
from torch.distributed import rpc

import ddpx
from ddpx import ReducerDDP

if not rpc.is_available():
    pytest.skip("this torch has no torch.distributed.rpc", allow_module_level=True)

# Each test, and its number of ranks.
TORCH_TESTS = {
    "test_backward_ddp_outside": 6,
    "test_backward_ddp_outside_uneven_inputs": 6,
    "test_backward_ddp_inside": 6,
    "test_ddp_comparison": 4,
    "test_ddp_comparison_uneven_inputs": 4,
    "test_ddp_dist_autograd_sparse_grads": 4,
    "test_ddp_dist_autograd_local_vs_remote": 4,
}


def _on_ranks(world: int, folder: Path, function: Callable[..., None], *args: Any) -> None:
    """Runs ``function(rank, folder, ...)`` in new processes, since RPC leaves threads."""
    try:
        run_in_new_ranks(_rank, (str(folder), function, args), world)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        texts = [path.read_text() for path in sorted(folder.glob("error*"))]
        raise AssertionError("\n".join([str(error), *texts])) from None


def _rank(rank: int, folder: str, function: Callable[..., None], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    try:
        function(rank, folder, *args)
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        raise


# ---- torch's tests -------------------------------------------------------------------------------


def _run_torch_test(rank: int, folder: str, name: str) -> None:
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as tests
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as agent

    tests.DistributedDataParallel = ReducerDDP
    of_torch = tests.DdpUnderDistAutogradTest if "backward" in name else tests.DdpComparisonTest

    class Case(common_utils.TestCase, agent.TensorPipeRpcAgentTestFixture, of_torch):  # type: ignore[misc, valid-type]
        rank: int
        file_name: str

    case = Case(name)
    case.rank = rank
    case.file_name = f"{folder}/group"
    with mock.patch.object(dist, "init_process_group", _init_on_all(dist.init_process_group)):
        getattr(case, name)()


def _init_on_all(init: Callable[..., None]) -> Callable[..., None]:
    """As ``init``, and waits until all ranks have the group: a call of another rank may need it."""

    def init_and_meet(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        dist.barrier()

    return init_and_meet


@pytest.mark.parametrize("name", TORCH_TESTS)
def test_of_torch(name: str, tmp_path: Path) -> None:
    _on_ranks(TORCH_TESTS[name], tmp_path, _run_torch_test, name)


# ---- bits of DDP ---------------------------------------------------------------------------------


class _Branches(nn.Module):
    """Rank 1 leaves out the second branch. No rank uses the third one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 4)
        self.second = nn.Linear(16, 4)
        self.third = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        return found if dist.get_rank() == 1 else found + self.second(x)


def _init(rank: int, folder: str, world: int = 2) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    dist.init_process_group("gloo", init_method=f"file://{folder}/pg", rank=rank, world_size=world)


def _end() -> None:
    dist.barrier()
    dist.destroy_process_group()
    rpc.shutdown()


def _step(model: Wrapper, number: int) -> dict[str, torch.Tensor]:
    """Returns the gradients in the context. ``grad`` does not change."""
    torch.manual_seed(10 * number + dist.get_rank())
    named = list(model.module.named_parameters())
    with dist_autograd.context() as context_id:
        loss = model(torch.randn(6, 16)).square().mean()
        held = [param.grad for _, param in named]
        values = [None if grad is None else grad.clone() for grad in held]
        dist_autograd.backward(context_id, [loss])
        grads = dist_autograd.get_gradients(context_id)
        found = {name: grads[param].clone() for name, param in named if param in grads}
    for (name, param), grad, value in zip(named, held, values, strict=True):
        assert param.grad is grad, name
        assert value is None or torch.equal(param.grad, value), name
    return found


def _train(cls: Callable[..., Wrapper], mode: str) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = cls(Mlp(), **MODES[mode], **SMALL_CAP)
    steps = []
    for number in range(5):
        steps.append(_step(model, number))
        with torch.no_grad():
            for name, param in model.module.named_parameters():
                param -= 0.1 * steps[-1][name]
    model(torch.ones(6, 16)).sum().backward()
    steps.append({name: param.grad.clone() for name, param in model.module.named_parameters()})
    if mode != "view":  # a gradient in a bucket changes with the next step
        steps.append(_step(model, 9))
    return steps


def _check_bits(rank: int, folder: str, mode: str) -> None:
    _init(rank, folder)
    theirs, ours = (_train(cls, mode) for cls in WRAPPERS)
    for number, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        assert expected.keys() == found.keys(), number
        for name, grad in expected.items():
            assert torch.equal(grad, found[name]), (number, name)
    _end()


@pytest.mark.parametrize("mode", MODES)
def test_bits_of_ddp(mode: str, tmp_path: Path) -> None:
    _on_ranks(2, tmp_path, _check_bits, mode)


def _check_unused(rank: int, folder: str) -> None:
    """A rank that left a parameter out gets the average of the others. DDP fails here."""
    _init(rank, folder)
    torch.manual_seed(0)
    model = ReducerDDP(_Branches(), find_unused_parameters=True)
    for number in range(3):
        grads = _step(model, number)
        assert not any("third" in name for name in grads), grads.keys()
        for name in ("first.weight", "second.weight"):
            everywhere = [torch.empty_like(grads[name]) for _ in range(2)]
            dist.all_gather(everywhere, grads[name])
            assert torch.equal(*everywhere) and everywhere[0].any(), name
    _end()


def test_parameters_that_a_rank_leaves_out(tmp_path: Path) -> None:
    _on_ranks(2, tmp_path, _check_unused)


def _check_local(rank: int, folder: str) -> None:
    """In ``no_sync``, the context has local gradients. The next backward averages its own alone."""
    _init(rank, folder)
    torch.manual_seed(0)
    model = ReducerDDP(Mlp())
    for number in range(3):
        with model.no_sync():
            local = _step(model, number)["third.bias"]
        everywhere = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(everywhere, local)
        assert not torch.equal(*everywhere)
        averaged = _step(model, number)["third.bias"]
        torch.testing.assert_close(averaged, sum(everywhere) / 2)
    assert all(param.grad is None for param in model.parameters())
    _end()


def test_no_sync(tmp_path: Path) -> None:
    _on_ranks(2, tmp_path, _check_local)


def _fail(grad: torch.Tensor) -> None:
    raise ValueError("on purpose")


def _check_failure(rank: int, folder: str) -> None:
    """A backward that raises restores ``grad``. The next step works."""
    _init(rank, folder)
    torch.manual_seed(0)
    model = ReducerDDP(Mlp())
    model(torch.ones(6, 16)).sum().backward()
    for number in range(3):
        model.module.first.weight.grad = None if number else torch.ones(24, 16)
        held = [param.grad for param in model.parameters()]
        with dist_autograd.context() as context_id:
            x = torch.ones(6, 16, requires_grad=True)
            hidden = x * 1
            hidden.register_hook(_fail)
            with pytest.raises(RuntimeError, match="Error on Node"):  # torch has no text
                dist_autograd.backward(context_id, [model(hidden).sum()])
        model.reset()  # waits for the thread that reports the error to the reducer
        assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
        _step(model, number)
    _end()


def test_a_backward_that_raises(tmp_path: Path) -> None:
    _on_ranks(2, tmp_path, _check_failure)


# ---- sums and averages by weight -----------------------------------------------------------------


def _micro_step(model: Wrapper, context_id: int, number: int, average: str, sync: bool) -> None:
    if average == "weights":
        ddpx.set_weight(model, 3 + dist.get_rank() + number)
    torch.manual_seed(10 * number + dist.get_rank())
    with nullcontext() if sync else ddpx.no_sync(model):
        dist_autograd.backward(context_id, [model(torch.randn(6, 16)).square().sum()])


def _averages(average: str, number: int) -> dict[str, torch.Tensor]:
    """The averages of two micro-steps, without a wrapper and without a context."""
    torch.manual_seed(0)
    module = Mlp()
    for micro in (number, number + 1):
        torch.manual_seed(10 * micro + dist.get_rank())
        module(torch.randn(6, 16)).square().sum().backward()
    divisor = {"mean": 2, "sum": 1, "weights": 16 + 4 * number}[average]
    for param in module.parameters():
        dist.all_reduce(param.grad)
        param.grad /= divisor  # type: ignore[operator]
    return {name: param.grad for name, param in module.named_parameters()}  # type: ignore[misc]


def _check_average(rank: int, folder: str, front: Callable[..., Wrapper], mode: str) -> None:
    """Micro-steps of one context have one average. Each context begins anew."""
    _init(rank, folder)
    for average in ("mean", "sum", "weights"):
        torch.manual_seed(0)
        module = Mlp()
        model = front(module, average=average, **MODES[mode], **SMALL_CAP)
        for number in range(4):
            with dist_autograd.context() as context_id:
                _micro_step(model, context_id, number, average, sync=False)
                _micro_step(model, context_id, number + 1, average, sync=True)
                grads = dist_autograd.get_gradients(context_id)
            expected = _averages(average, number)
            for name, param in module.named_parameters():
                torch.testing.assert_close(grads[param], expected[name])
                assert param.grad is None
            with dist_autograd.context() as context_id:  # ends without an averaged backward
                _micro_step(model, context_id, number, average, sync=False)
                # A thread of the engine may hold the context, too, for a moment.
                held = dist_autograd._retrieve_context(context_id)
        del held
    _end()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("front", [ReducerDDP, ddpx.replicate])
def test_averages_of_micro_steps(front: Callable[..., Wrapper], mode: str, tmp_path: Path) -> None:
    _on_ranks(2, tmp_path, _check_average, front, mode)


def _check_kept(rank: int, folder: str) -> None:
    """A sum that stays in a context must not be summed again. Gradients elsewhere do not count."""
    _init(rank, folder)
    for average in ("sum", "weights"):
        torch.manual_seed(0)
        model = ReducerDDP(Mlp(), average=average, **SMALL_CAP)
        for number in range(3):
            with dist_autograd.context() as context_id:
                _micro_step(model, context_id, number, average, sync=True)
                with pytest.raises(
                    RuntimeError, match=r"one context of torch\.distributed\.autograd"
                ):
                    _micro_step(model, context_id, number, average, sync=True)
            model.reset()  # waits for the thread that reports the error to the reducer
        for sync in (True, False):  # an average, or a local gradient
            model.zero_grad()
            if average == "weights":
                ddpx.set_weight(model, 1)
            with nullcontext() if sync else model.no_sync():
                model(torch.ones(6, 16)).sum().backward()
            held = [param.grad.clone() for param in model.parameters()]
            with dist_autograd.context() as context_id:
                _micro_step(model, context_id, 0, average, sync=True)
            for param, grad in zip(model.parameters(), held, strict=True):
                assert torch.equal(param.grad, grad)
        if average == "weights":
            ddpx.set_weight(model, 1)
        model(torch.ones(6, 16)).sum().backward()
        with pytest.raises(RuntimeError, match="still have the gradient of the last averaged"):
            if average == "weights":
                ddpx.set_weight(model, 1)
            model(torch.ones(6, 16)).sum().backward()
    _end()


def test_averages_that_stay(tmp_path: Path) -> None:
    _on_ranks(2, tmp_path, _check_kept)


def _check_lost_weights(rank: int, folder: str) -> None:
    """A backward raises, and its context keeps the gradients of a micro-step, without the weight.

    The next averaged backward raises in this context, and works in a new one.
    """
    _init(rank, folder)
    torch.manual_seed(0)
    model = ReducerDDP(Mlp(), average="weights")
    for number in range(2):
        with dist_autograd.context() as context_id:
            _micro_step(model, context_id, number, "weights", sync=False)
            handle = model.module.first.weight.register_hook(_fail)
            with pytest.raises(RuntimeError, match="Error on Node"):
                _micro_step(model, context_id, number, "weights", sync=True)
            handle.remove()
            model.reducer.set_weight(1)  # waits for the thread that reports the error
            with pytest.raises(RuntimeError, match="because a backward raised"):
                _micro_step(model, context_id, number, "weights", sync=True)
        with dist_autograd.context() as context_id:
            _micro_step(model, context_id, number, "weights", sync=False)
            _micro_step(model, context_id, number + 1, "weights", sync=True)
            grads = dist_autograd.get_gradients(context_id)
        expected = _averages("weights", number)
        for name, param in model.module.named_parameters():
            torch.testing.assert_close(grads[param], expected[name])
    _end()


def test_lost_weights(tmp_path: Path) -> None:
    _on_ranks(2, tmp_path, _check_lost_weights)
