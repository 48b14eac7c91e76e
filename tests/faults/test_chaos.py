"""Chaos: ranks in trouble at random moments, again and again; the same rounds for the same seed."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from fault_cases import MODES
from fault_ranks import Ending, crash, mark, run_ranks, text_of
from torch import nn

import ddpx
from ddpx import ReducerDDP

DEADLINE_S = 5.0
SEED = 20
SHORT_S, LONG_S = 20.0, 300.0
_MOST_S = 15.0  # of training without any report: much longer than allowed


@dataclass(frozen=True)
class Round:
    """Ranks ``victims`` meet ``fault`` so many seconds after they began."""

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
        random_.choice(["kill", "segfault", "exit", "exception"]),
        tuple(sorted(random_.sample(range(world_size), num_victims))),
        random_.uniform(0.0, 0.6),
    )


def _train(round_: Round) -> tuple[str, str, float, tuple[int, ...]]:
    """Kind and text of the error, its time, and the ranks that it names."""
    raises = threading.Event()
    if dist.get_rank() in round_.victims:
        strike = raises.set if round_.fault == "exception" else lambda: _strike(round_.fault)
        threading.Timer(round_.after_s, strike).start()
    deadline = time.monotonic() + _MOST_S
    try:
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        model = ReducerDDP(layers, bucket_cap_mb=0.02, **MODES[round_.mode])
        while time.monotonic() < deadline:
            model(torch.ones(2, 64)).sum().backward()
            if raises.is_set():
                mark("fault")
                raise ValueError("chaos")
    except ValueError:
        raise
    except Exception as error:
        ranks = error.ranks if isinstance(error, ddpx.RankFailure) else ()
        return type(error).__name__, text_of(error), time.monotonic(), ranks
    return "", "no error", time.monotonic(), ()


def _strike(fault: str) -> None:
    mark("fault")
    crash(fault)


def _check(round_: Round, endings: list[Ending]) -> None:
    struck = [endings[rank].marks["fault"] for rank in round_.victims if endings[rank].marks]
    assert struck, (round_, endings)
    for rank, ending in enumerate(endings):
        if rank in round_.victims and ending.value is None:
            continue  # dead; a victim that reports another's death first is a survivor
        assert ending.value is not None, (round_, endings)
        kind, text, at_s, ranks = ending.value
        assert kind == "RankFailure", (round_, text)
        assert f"[ddpx rank {rank}, " in text, (round_, text)
        assert ranks and set(ranks) <= set(round_.victims), (round_, text)
        assert at_s - min(struck) < DEADLINE_S, (round_, at_s - min(struck), text)
        assert ending.exit_code is not None, (round_, "hung at its end", ending)


@pytest.mark.timeout(400)
def test_chaos(request: pytest.FixtureRequest) -> None:
    limit_s = LONG_S if request.config.getoption("--full") else SHORT_S
    end = time.monotonic() + limit_s
    number = 0
    while time.monotonic() < end:
        round_ = draw(number)
        _check(
            round_,
            run_ranks(
                round_.world_size,
                _train,
                round_,
                backend=round_.transport,
                identities=round_.identities[: round_.world_size],
            ),
        )
        number += 1
    print(f"{number} rounds")
    assert number > 0
