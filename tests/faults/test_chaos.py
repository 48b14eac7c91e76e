"""Chaos: faults at random moments, many times. Equal seeds give equal rounds."""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from fault_cases import MODES
from fault_ranks import Ending, again_if_held_up, crash, mark, run_ranks, stop_for, text_of
from torch import nn

import ddpx
from ddpx import ReducerDDP

DEADLINE_S = 5.0
# a seed whose first six rounds have each kind of fault, both transports, and several hosts
SEED = 1492
SHORT_S, LONG_S = 30.0, 300.0
_MOST_S = 15.0  # time limit for a training without a report, much longer than allowed

# The stop time of a rank. Its peers wait, or raise if configured. The machine may delay other
# ranks, but not for as long.
_STOP_S = 6.0
_PATIENCE_S = 3.0
_PATIENCE = {
    "stop": {"DDPX_STALL_WARN": str(_PATIENCE_S)},
    "stop, raise": {"DDPX_STALL_ERROR": str(_PATIENCE_S)},
}
# errors per fault; all other faults give RankFailure
_KINDS = {"stop": "", "stop, raise": "RankStalled"}


@dataclass(frozen=True)
class Round:
    """The ranks ``victims`` get ``fault`` this many seconds after their start."""

    number: int
    world_size: int
    transport: str
    identities: str
    mode: str
    fault: str
    victims: tuple[int, ...]
    after_s: float


def draw(number: int) -> Round:
    random_ = random.Random(f"{SEED} {number}")
    world_size = random_.randint(2, 4)
    num_victims = random_.randint(1, world_size - 1)
    return Round(
        number,
        world_size,
        random_.choice(["gloo", "shm"]),
        random_.choice(["", "", "ABAB"]),
        random_.choice(sorted(MODES)),
        random_.choice(["kill", "segfault", "exit", "exception", "stop", "stop, raise"]),
        tuple(sorted(random_.sample(range(world_size), num_victims))),
        random_.uniform(0.0, 0.6),
    )


@dataclass(frozen=True)
class Report:
    """The error, its time and the named ranks, and the warnings before it."""

    kind: str
    text: str
    at_s: float
    ranks: tuple[int, ...]
    warnings: tuple[str, ...]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _train(round_: Round) -> Report:
    warnings = _Warnings()
    logging.getLogger("ddpx.health").addHandler(warnings)
    error: Exception | None = None
    try:
        _train_until_struck(round_)
    except ValueError:
        raise
    except Exception as raised:
        error = raised
    at_s = time.monotonic()
    ranks = error.lost_ranks if isinstance(error, ddpx.RankError) else ()
    kind, text = ("", "no error") if error is None else (type(error).__name__, text_of(error))
    return Report(kind, text, at_s, ranks, tuple(warnings.texts))


def _train_until_struck(round_: Round) -> None:
    """Trains until the fault, and until its end if the fault ends."""
    struck = threading.Event()
    is_victim = dist.get_rank() in round_.victims
    if is_victim:
        threading.Timer(round_.after_s, _strike, (round_.fault, struck)).start()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    # Linear in the input, whose mean over ranks is (world size + 1) / 2.
    (grad,) = torch.autograd.grad(layers(torch.ones(2, 64)).sum(), layers[0].weight)
    expected = grad * (dist.get_world_size() + 1) / 2
    model = ReducerDDP(layers, bucket_cap_mb=0.02, **MODES[round_.mode])
    if round_.mode == "check finite":
        model.set_check_finite()
    deadline = time.monotonic() + _MOST_S
    while time.monotonic() < deadline:
        model.zero_grad()
        model(torch.ones(2, 64) * (dist.get_rank() + 1)).sum().backward()
        torch.testing.assert_close(layers[0].weight.grad, expected)
        if struck.is_set() and round_.fault == "exception":
            mark("fault")
            raise ValueError("chaos")
        if round_.fault == "stop" and _all(struck.is_set() or not is_victim):
            return


def _all(here: bool) -> bool:
    """Whether the condition holds on all ranks."""
    everywhere = torch.tensor(int(here))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


def _strike(fault: str, struck: threading.Event) -> None:
    if fault != "exception":  # the thread of the training has to raise it
        mark("fault")
        if fault.startswith("stop"):
            stop_for(_STOP_S)
            mark("awake")
        else:
            crash(fault)
    struck.set()


def _check(round_: Round, endings: list[Ending]) -> None:
    marks = [endings[rank].marks for rank in round_.victims if endings[rank].marks]
    assert marks, (round_, endings)
    for rank, ending in enumerate(endings):
        dies = rank in round_.victims and not round_.fault.startswith("stop")
        if dies and ending.value is None:
            continue  # dead; a victim that reports the death of another rank first is a survivor
        assert isinstance(ending.value, Report), (round_, endings)
        _check_report(round_, rank, ending.value, min(_since_s(round_, marks, ending)))
        assert ending.exit_code == 0, (round_, "did not end as it should", ending)


def _since_s(round_: Round, marks: list[dict[str, float]], ending: Ending) -> list[float]:
    """The times from which the report may come: after the wake-up of this rank, else after each
    fault and the configured wait."""
    if "awake" in ending.marks:
        return [ending.marks["awake"]]
    patience_s = _PATIENCE_S if round_.fault == "stop, raise" else 0.0
    return [each["fault"] + patience_s for each in marks]


def _check_report(round_: Round, rank: int, report: Report, since_s: float) -> None:
    where = (round_, rank, report)
    assert report.kind == _KINDS.get(round_.fault, "RankFailure"), where
    named = set(round_.victims)
    for text in report.warnings:
        if " missing: " in text:
            assert any(f"rank {victim}, " in text for victim in named), where
    if report.kind:
        assert f"[ddpx rank {rank}, " in report.text, where
        assert set(report.ranks) <= named, where
        assert report.ranks or _may_be_in_a_collective(round_, report), where
        assert report.at_s - since_s < DEADLINE_S, (report.at_s - since_s, where)


def _may_be_in_a_collective(round_: Round, report: Report) -> bool:
    """Whether the victims may have been stopped in a collective that they had reached.

    Other hosts know a host by its last message only. If all ranks of a host are stopped right after
    a message that they have reached the collective, then no rank is missing.
    """
    hosts = round_.identities[: round_.world_size]
    going = {host for rank, host in enumerate(hosts) if rank not in round_.victims}
    stopped = set(hosts) - going
    return round_.fault == "stop, raise" and bool(stopped) and "no rank is missing" in report.text


def _go_through(round_: Round) -> None:
    _check(
        round_,
        run_ranks(
            round_.world_size,
            _train,
            round_,
            backend=round_.transport,
            identities=round_.identities[: round_.world_size],
            environment=_PATIENCE.get(round_.fault),
        ),
    )


@pytest.mark.timeout(400)
def test_chaos(request: pytest.FixtureRequest) -> None:
    limit_s = LONG_S if request.config.getoption("--full") else SHORT_S
    end = time.monotonic() + limit_s
    number = 0
    while time.monotonic() < end:
        round_ = draw(number)
        # If ranks communicate through a store only, late answers of the store take seconds.
        go_through = again_if_held_up(_go_through) if round_.identities else _go_through
        go_through(round_)
        number += 1
    print(f"{number} rounds")
    assert number > 0
