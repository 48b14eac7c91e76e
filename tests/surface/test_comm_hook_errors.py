"""A communication hook fails. The error names its bucket, and the next step works."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, WRAPPERS, Mlp, assert_same_on_all_ranks, mlp_step
from modes import MODES
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpx import ReducerDDP
from ddpx._C import Phase


class _Fault:
    """The state of a hook that succeeds, unless it is told to fail at one bucket."""

    def __init__(self) -> None:
        self.how = ""
        self.bucket_index = 0


def _faulty_hook(state: _Fault, bucket: dist.GradBucket):
    if not state.how or bucket.index() != state.bucket_index:
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]
    # Peers get their results: only this rank's result is invalid.
    buffer = bucket.buffer()
    dist.all_reduce(buffer)
    future: torch.futures.Future[Any] = torch.futures.Future()
    if state.how == "raises":
        raise MemoryError("no more memory")
    if state.how == "future has an error":
        future.set_exception(MemoryError("no more memory"))
    elif state.how == "no future":
        return buffer
    elif state.how == "None":
        return None
    elif state.how == "future of a string":
        future.set_result("a string")
    elif state.how == "future of a collective":  # a list that C++ created
        return dist.all_reduce(buffer, async_op=True).get_future()
    elif state.how == "future of a list":
        future.set_result([buffer])
    elif state.how == "callback raises":
        future.set_result(buffer)
        return future.then(_raise)
    elif state.how == "too few elements":
        future.set_result(buffer[:-3].clone())
    elif state.how == "too many elements":
        future.set_result(torch.cat((buffer, buffer)))
    return future


def _raise(future: torch.futures.Future[Any]) -> None:
    raise MemoryError("no more memory")


FAULTS = {
    "raises": "no more memory",
    "future has an error": "no more memory",
    "callback raises": "no more memory",
    "no future": "callback must return a torch.futures.Future object, but got Tensor",
    "None": "callback must return a torch.futures.Future object, but got NoneType",
    "future of a string": "",
    "future of a list": "",
    "future of a collective": "",
}


def _check_fault(how: str, expected: str, mode: str, bucket_index: int, on_ranks: int) -> None:
    torch.manual_seed(0)
    model = ReducerDDP(Mlp(), **MODES[mode], **SMALL_CAP)
    fault = _Fault()
    model.register_comm_hook(fault, _faulty_hook)
    for number in range(3):
        model.zero_grad()
        torch.manual_seed(10 * number + dist.get_rank())
        mlp_step(model)
    fault.bucket_index = bucket_index
    for _ in range(2):  # also a second time
        if dist.get_rank() < on_ranks:
            fault.how = how
            step = model.reducer.num_steps
            with pytest.raises((RuntimeError, MemoryError)) as caught:
                mlp_step(model)
            text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
            assert how != "raises" or caught.type is MemoryError
            names = [list(dict(model.module.named_parameters()))[i] for i in _members(model)]
            assert expected in text
            assert f"[ddpx rank {dist.get_rank()}, step {step}, phase " in text, text
            assert f"bucket {bucket_index} ('{names[0]}'" in text, text
        else:
            mlp_step(model)
        fault.how = ""
        assert model.reducer.phase == Phase.IDLE
    dist.barrier()
    for number in range(3):
        model.zero_grad()
        torch.manual_seed(100 * number + dist.get_rank())
        mlp_step(model)
        assert_same_on_all_ranks(*(param.grad for param in model.module.parameters()))
    assert_same_on_all_ranks(torch.tensor(model.reducer.num_steps))


def _members(model: ReducerDDP) -> list[int]:
    return model.reducer.plan.buckets[_BUCKET]


_BUCKET = 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", FAULTS)
def test_failing_hook(ranks, how, mode):
    """Fails on every rank, so that collectives match afterwards, whatever was launched before."""
    ranks(2).run(_check_fault, how, FAULTS[how], mode, _BUCKET, 2)


@pytest.mark.parametrize("mode", ["default", "find unused"])
@pytest.mark.parametrize("how", ["future has an error", "callback raises"])
def test_hook_that_fails_on_one_rank(ranks, how, mode):
    """The hook fails after all launches. The peer has had a complete step, and both count it."""
    ranks(2).run(_check_fault, how, FAULTS[how], mode, _BUCKET, 1)


@pytest.mark.parametrize("mode", ["default", "view"])
@pytest.mark.parametrize("how", ["too few elements", "too many elements"])
def test_result_of_another_size(ranks, how, mode):
    """A result with too many elements must not be cut, as it is in DDP."""
    ranks(2).run(_check_fault, how, "elements", mode, _BUCKET, 2)


def _check_first_step(how: str, mode: str, on_ranks: int) -> None:
    """Fails in the first step, too, in which one bucket has everything."""
    model = ReducerDDP(Mlp(), **MODES[mode])
    fault = _Fault()
    model.register_comm_hook(fault, _faulty_hook)
    if dist.get_rank() < on_ranks:
        fault.how = how
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            mlp_step(model)
        notes = getattr(caught.value, "__notes__", [])
        assert "bucket 0 ('first.weight', " in "\n".join([str(caught.value), *notes])
        fault.how = ""
    else:
        mlp_step(model)
    for number in range(4):
        model.zero_grad()
        torch.manual_seed(100 * number + dist.get_rank())
        mlp_step(model)
        assert_same_on_all_ranks(*(param.grad for param in model.module.parameters()))


@pytest.mark.parametrize("how", ["raises", "future has an error"])
def test_failing_hook_in_the_first_step(ranks, how):
    ranks(2).run(_check_first_step, how, "default", 2)


@pytest.mark.parametrize("mode", MODES)
def test_hook_that_fails_on_one_rank_in_the_first_step(ranks, mode):
    ranks(2).run(_check_first_step, "future has an error", mode, 1)


class _OfUser(RuntimeError):
    """A type that torch does not know."""


def _check_error_stays(cls: Callable[..., Any], error: BaseException, manual: bool) -> None:
    """The script gets the object that its hook raised, as from DDP, with a note from ddpx."""
    model = cls(Mlp())
    if manual:
        model.require_manual_backward_finalization = True
    seen: list[str] = []

    def hook(state, bucket):
        seen.append("called")
        raise error

    model.register_comm_hook(None, hook)

    def step() -> None:
        mlp_step(model)
        if manual:
            model.finalize_backward()

    with pytest.raises(type(error)) as caught:
        step()
    assert seen and caught.value is error
    if cls is not WRAPPERS[0]:
        assert "bucket 0 ('first.weight', " in "".join(getattr(error, "__notes__", []))
    dist.barrier()


class _WithoutAttributes(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


ERRORS = [
    ValueError("mine"),
    KeyError("mine"),
    _OfUser("mine"),
    NotImplementedError("mine"),
    dist.DistBackendError("mine"),
    KeyboardInterrupt(),
    SystemExit(3),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("cls", WRAPPERS)
def test_the_error_of_a_hook_keeps_its_type(ranks, cls, error):
    ranks(2).run(_check_error_stays, cls, error, False)


@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
def test_the_error_of_a_hook_keeps_its_type_in_finalize_backward(ranks, error):
    ranks(2).run(_check_error_stays, ReducerDDP, error, True)


def _check_callback(error: Exception, times: int) -> None:
    """A callback of the future raises. The text names the hook."""
    model = ReducerDDP(Mlp())

    def raises(future: torch.futures.Future[Any]) -> None:
        raise error

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future().then(raises)
        for _ in range(times - 1):  # reads the future that has failed
            future = future.then(lambda failed: failed.value()[0])
        return future

    model.register_comm_hook(None, hook)
    for _ in range(3):
        with pytest.raises(RuntimeError) as caught:
            mlp_step(model)
        text = str(caught.value)
        assert "] the communication hook of bucket 0 ('" in text and "'first.weight'" in text, text
        assert ") raised: Got the following error when running the callback: " in text, text
        assert f"{type(error).__name__}: " in text, text
        assert "Do not use the gradients of this step." in text, text
        assert "If a collective call of the hook failed, another rank may have died" in text, text
        dist.barrier()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "error", [KeyError("mine"), RuntimeError("mine")], ids=lambda error: type(error).__name__
)
def test_error_of_a_callback_names_the_hook(ranks, error, times):
    ranks(2).run(_check_callback, error, times)


def _check_error_set_in_the_future() -> None:
    model = ReducerDDP(Mlp())
    error = KeyError("mine")

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_exception(error)
        return future

    model.register_comm_hook(None, hook)
    with pytest.raises(KeyError) as caught:
        mlp_step(model)
    assert caught.value is error
    notes = "".join(getattr(error, "__notes__", []))
    assert "the communication hook of bucket 0 ('first.weight', " in notes, notes
    dist.barrier()


def test_error_that_is_set_in_the_future_stays(ranks):
    ranks(2).run(_check_error_set_in_the_future)


def _check_error_without_notes() -> None:
    model = ReducerDDP(Mlp())

    def hook(state, bucket):
        raise _WithoutAttributes("mine")

    model.register_comm_hook(None, hook)
    with pytest.raises(_WithoutAttributes, match="mine"):
        mlp_step(model)
    dist.barrier()


def test_the_error_of_a_hook_that_takes_no_notes(ranks):
    ranks(2).run(_check_error_without_notes)


def _check_registration() -> None:
    model = ReducerDDP(Mlp())

    def other_bucket(state: object, bucket: int):
        raise AssertionError

    def other_result(state: object, bucket: dist.GradBucket) -> int:
        raise AssertionError

    refused: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "must be callable"),
        (lambda bucket: None, TypeError, "cannot be called with two arguments"),
        (lambda state, bucket, more: None, TypeError, "missing a required argument: 'more'"),
        (lambda state, *, bucket: None, TypeError, "cannot be called with two arguments"),
        (other_bucket, ValueError, "bucket annotation should be dist.GradBucket"),
        (other_result, ValueError, "return annotation should be torch.futures.Future"),
    ]
    for hook, error, text in refused:
        with pytest.raises(error, match=text):
            model.register_comm_hook(None, hook)
        assert text in str(model._get_ddp_logging_data()["error"])

    ReducerDDP(Mlp()).register_comm_hook(None, lambda *args: allreduce_hook(*args))

    def with_text(
        state: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return allreduce_hook(state, bucket)

    assert type(with_text.__annotations__["bucket"]) is str
    ReducerDDP(Mlp()).register_comm_hook(None, with_text)
    model.register_comm_hook(None, allreduce_hook)
    for register in (
        lambda: model.register_comm_hook(None, allreduce_hook),
        lambda: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    ):
        with pytest.raises(RuntimeError, match="can only be called once"):
            register()
    with pytest.raises(ValueError, match="annotation"):
        model.register_comm_hook(None, other_bucket)


def test_registration_is_checked(ranks):
    ranks(2).run(_check_registration)


def _check_registration_inside_backward(register: Callable[[ReducerDDP], None]) -> None:
    model = ReducerDDP(Mlp())
    caught: list[str] = []

    def try_to_register(grad: torch.Tensor) -> None:
        with pytest.raises(RuntimeError) as error:
            register(model)
        caught.append(str(error.value))

    model.module.first.weight.register_hook(try_to_register)
    mlp_step(model)
    assert "while a backward runs" in caught[0]
    mlp_step(model)
    assert_same_on_all_ranks(*(param.grad for param in model.module.parameters()))


def _register_python(model: ReducerDDP) -> None:
    model.register_comm_hook(None, allreduce_hook)


def _register_builtin(model: ReducerDDP) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


@pytest.mark.parametrize("register", [_register_python, _register_builtin])
def test_no_registration_inside_backward(ranks, register):
    ranks(2).run(_check_registration_inside_backward, register)


def _check_second_hook_in_a_backward(cls: Callable[..., Any]) -> None:
    model = cls(Mlp())
    model.register_comm_hook(None, allreduce_hook)
    errors = []

    def register_again(_: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="can only be called once") as caught:
            model.register_comm_hook(None, allreduce_hook)
        errors.append(caught.value)

    model.module.first.weight.register_hook(register_again)
    mlp_step(model)
    assert len(errors) == 1


@pytest.mark.parametrize("cls", WRAPPERS)
def test_a_second_hook_has_the_same_error_in_a_backward(ranks, cls):
    ranks(2).run(_check_second_hook_in_a_backward, cls)


def _hook_of_a_group(state: Any, bucket: dist.GradBucket):
    return allreduce_hook(getattr(state, "process_group", state), bucket)


def _check_group_of_state() -> None:
    """The hook would go on to average over the former group, without an error."""
    former, alone = dist.new_group(), [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for state in (former, SimpleNamespace(process_group=former)):
        model = ReducerDDP(Mlp(), process_group=former)
        model.register_comm_hook(state, _hook_of_a_group)
        model._update_process_group(former)
        with pytest.raises(RuntimeError, match="the communication hook has the former process"):
            model._update_process_group(alone)
    state.process_group = alone
    model._update_process_group(alone)
    mlp_step(model)


def test_a_hook_does_not_keep_the_former_group(ranks):
    ranks(2).run(_check_group_of_state)
