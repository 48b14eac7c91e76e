"""Ranks wrap different modules, or make different collective calls.

All ranks report this in time.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist
from fault_ranks import Ending, run_ranks
from mistakes import (
    CONSTRUCTION,
    Outcome,
    call_once_more,
    freeze_a_layer,
    make_mistake,
    outcome_of,
    outcome_unless_odd,
    use_own_layers,
)
from pairwise import all_rows, cover
from torch import nn

from ddpx import ReducerDDP

pytestmark = pytest.mark.timeout(90)
DEADLINE_S = 5.0
SEED = 6
VALUES: dict[str, Any] = {
    "mistake": tuple(CONSTRUCTION),
    "transport": ("gloo", "shm"),
    "world_size": (2, 3, 4),
}
# The part of the report about the rank that differs.
DIFFERENCES = {
    "has one parameter more": "parameter 'bias': absent on ",
    "has a parameter of another shape": "; shape (5, 4), float32, strides (4, 1), trained on ",
    "has parameters of another dtype": "; shape (4, 4), float64, strides (4, 1), trained on ",
    "names its parameters otherwise": "parameter 'other.weight': absent on ",
    "has a parameter of other strides": "; shape (4, 3, 3, 3), float32, strides (27, 1, 9, 3), ",
    "has frozen a layer": "parameter '0.weight': shape (4, 4), float32, strides (4, 1), ",
    "has a buffer of another shape": "buffer 'mean': shape (4,), float32, strides (1,) on ",
    "is given another option": "option find_unused_parameters: False on ",
}
# Buckets of a gloo group stay on the group, so that they meet the other calls of the group.
ON_THE_GROUP = {"DDPX_TRANSPORT": "group"}
PLACES = ("forward", "gradient hook", "communication hook", "between steps")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        rows = all_rows(VALUES, lambda row: True)
        if not metafunc.config.getoption("--full"):
            rows = [rows[index] for index in cover(rows, SEED)]
        ids = ["-".join(str(value).replace(" ", "_") for value in row.values()) for row in rows]
        metafunc.parametrize("row", rows, ids=ids)


def _outcomes(endings: list[Ending]) -> list[Outcome]:
    """The outcomes of ranks that all raised in time and ended as expected."""
    start_s = min(ending.marks["fault"] for ending in endings)
    for rank, ending in enumerate(endings):
        assert isinstance(ending.value, Outcome), (rank, ending)
        assert ending.exit_code == 0, (rank, ending)
        assert ending.value.kind, (rank, "raised nothing")
        assert ending.value.at_s - start_s < DEADLINE_S, (rank, ending)
    return [ending.value for ending in endings]


def test_construction(row: dict[str, Any]) -> None:
    endings = run_ranks(
        row["world_size"], make_mistake, row["mistake"], ReducerDDP, backend=row["transport"]
    )
    outcomes = _outcomes(endings)
    assert {outcome.kind for outcome in outcomes} == {"RuntimeError"}, outcomes
    (text,) = {outcome.text for outcome in outcomes}
    assert "needs the same module, options and versions on every rank" in text, text
    assert DIFFERENCES[row["mistake"]] in text, text
    assert f" on rank {row['world_size'] - 1}\n" in text, text


def _check_same_report(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "RankMismatch", outcomes
        assert outcome.text.startswith(f"ddpx.RankMismatch: [ddpx rank {rank}, "), outcome
        assert "ranks made different collective calls" in outcome.text, outcome
    # After the opening, which names the reporting rank, and before the backend's own text.
    told = {out.text.split("] ", 1)[1].split(" The backend said: ")[0] for out in outcomes}
    assert len(told) == 1, told


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_swapped_backwards(world_size: int, transport: str) -> None:
    name = "runs two backwards the other way round"
    _check_same_report(
        _outcomes(run_ranks(world_size, make_mistake, name, ReducerDDP, backend=transport))
    )


_wrappers: list[ReducerDDP] = []


def _moved(module: nn.Module) -> ReducerDDP:
    """The group of both wrappers changes after the construction of the second wrapper."""
    _wrappers.append(ReducerDDP(module))
    for model in _wrappers if len(_wrappers) == 2 else ():
        model._update_process_group(dist.group.WORLD)
    return _wrappers[-1]


def test_swapped_backwards_after_a_change_of_the_group() -> None:
    name = "runs two backwards the other way round"
    _check_same_report(_outcomes(run_ranks(2, make_mistake, name, _moved)))


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_an_extra_call_that_fits_by_chance(transport: str) -> None:
    """The call has as many elements as a bucket.

    From then on, each step meets a call of another number.
    """
    outcomes = _outcomes(_call_once_more(3, "between steps", 1056, transport))
    _check_same_report(outcomes)
    words = r"\] rank 2 made one more collective call than rank 0, (\d+) against (\d+), by step \d"
    found = re.search(words, outcomes[0].text)
    assert found and int(found[1]) == int(found[2]) + 1, outcomes[0].text


@pytest.mark.parametrize("identities", ["AB", "AAB", "ABAC", "AABB"])
@pytest.mark.parametrize("transport, choice", [("gloo", "auto"), ("gloo", "shm"), ("shm", "auto")])
def test_swapped_backwards_between_hosts(transport: str, choice: str, identities: str) -> None:
    name = "runs two backwards the other way round, on another host"
    endings = run_ranks(
        len(identities),
        make_mistake,
        name,
        ReducerDDP,
        backend=transport,
        identities=identities,
        environment={"DDPX_TRANSPORT": choice},
    )
    _check_same_report(_outcomes(endings))


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_an_extra_call_that_fits_by_chance_between_hosts(transport: str) -> None:
    endings = run_ranks(
        2,
        outcome_of,
        call_once_more,
        ReducerDDP,
        "between steps",
        1056,
        1,
        200,
        0.02,
        backend=transport,
        identities="AB",
    )
    _check_same_report(_outcomes(endings))


def _call_once_more(
    world_size: int,
    place: str,
    num_elements: int,
    transport: str,
    timeout_s: float = 60.0,
    environment: Mapping[str, str] = ON_THE_GROUP,
) -> list[Ending]:
    return run_ranks(
        world_size,
        outcome_of,
        call_once_more,
        ReducerDDP,
        place,
        num_elements,
        backend=transport,
        timeout_s=timeout_s,
        environment=environment,
    )


@pytest.mark.parametrize("num_elements", [3, 1056])
@pytest.mark.parametrize("place", ["forward", "gradient hook", "between steps"])
def test_an_extra_call_beside_buckets_in_shared_memory(place: str, num_elements: int) -> None:
    """The call meets no bucket. Peers wait for the next bucket of the rank that makes the call."""
    endings = _call_once_more(3, place, num_elements, "gloo", timeout_s=5.0, environment={})
    for ending in endings[:2]:
        assert isinstance(ending.value, Outcome), endings
        assert ending.value.kind == "RankStalled", ending
        assert "rank 2 (host " in ending.value.text, ending
        assert ending.exit_code == 0, ending


@pytest.mark.parametrize("num_elements", [3, 5000])
@pytest.mark.parametrize("place", PLACES)
def test_an_extra_call_of_another_size_over_shm(place: str, num_elements: int) -> None:
    """The transport compares calls. The last rank gets the error from its own call.

    If a hook makes the call, the hook raises the error, which keeps its type.
    """
    outcomes = _outcomes(_call_once_more(3, place, num_elements, "shm"))
    in_hook = place == "communication hook"
    kind = "RuntimeError" if in_hook else "RankMismatch"
    kinds = [kind, kind, "DistBackendError"]
    assert [outcome.kind for outcome in outcomes] == kinds, outcomes
    for outcome in outcomes:
        assert "ranks called different operations: rank 0 called " in outcome.text, outcome
        assert f" (SUM of {num_elements} float32" in outcome.text, outcome
    assert in_hook or "Look for a collective call" in outcomes[0].text


@pytest.mark.parametrize("num_elements", [3, 5000])
@pytest.mark.parametrize("place", PLACES)
def test_an_extra_call_of_another_size_over_gloo(place: str, num_elements: int) -> None:
    """gloo ends one of the processes. The others report possible causes."""
    # The last rank gets the error from its own call, which may wait for the group's timeout.
    endings = _call_once_more(3, place, num_elements, "gloo", timeout_s=10.0)
    dead = [rank for rank, ending in enumerate(endings) if ending.value is None]
    assert dead and all(endings[rank].exit_code == -signal.SIGABRT for rank in dead), endings
    for rank in {0, 1}.difference(dead):
        kind, text = endings[rank].value.kind, endings[rank].value.text
        assert kind == "RankFailure", text
        assert any(f"rank {victim} (host " in text for victim in dead), text
        # The kernel may no longer know how a process ended.
        gloo = "gloo aborts a process if ranks make different collective calls"
        assert gloo in text or (f"rank {dead[0]}" in text and ") died" in text), text
        assert endings[rank].exit_code == 0, endings


# ---- ranks that train different parameters -------------------------------------------------------

SAME_EVERYWHERE: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    # The wrapper gets a number only when it launches its first bucket.
    "no comparison at construction": {"init_sync": False},
}


def _check_frozen(outcomes: list[Outcome], in_step: int | None = None) -> None:
    odd = len(outcomes) - 1
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "RankMismatch", outcomes
        found = re.match(rf"ddpx.RankMismatch: \[ddpx rank {rank}, step (\d+), ", outcome.text)
        assert found, outcome
        words = (
            rf"froze different parameters in step (\d+): '1.weight', '1.bias' on rank {odd} only. "
        )
        in_words = re.search(words, outcome.text)
        assert in_words and "Pass find_unused_parameters=True" in outcome.text, outcome
        if in_step is not None:
            assert int(in_words[1]) == in_step, outcome
            assert int(found[1]) <= in_step + 1, outcome


@pytest.mark.parametrize("in_step", [0, 2])
@pytest.mark.parametrize("mode", SAME_EVERYWHERE)
@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_freezes_a_layer(world_size: int, transport: str, mode: str, in_step: int) -> None:
    options = SAME_EVERYWHERE[mode]
    endings = run_ranks(
        world_size, outcome_of, freeze_a_layer, ReducerDDP, options, in_step, backend=transport
    )
    _check_frozen(_outcomes(endings), in_step)


@pytest.mark.parametrize("mode", ["default", "static"])
def test_one_rank_freezes_a_layer_between_hosts(mode: str) -> None:
    options = SAME_EVERYWHERE[mode]
    endings = run_ranks(
        2, outcome_of, freeze_a_layer, ReducerDDP, options, 1, 200, 0.02, identities="AB"
    )
    _check_frozen(_outcomes(endings))


# A static graph allows it in the first step.
@pytest.mark.parametrize(
    ("mode", "in_step"), [("default", 0), ("default", 2), ("view", 2), ("static", 2)]
)
@pytest.mark.parametrize("alone", [False, True], ids=["each rank another", "one rank"])
def test_ranks_leave_layers_out(mode: str, alone: bool, in_step: int) -> None:
    """A rank that misses a gradient names it. Its peers learn that this rank has ended."""
    world_size = 3
    options = SAME_EVERYWHERE[mode]
    endings = run_ranks(
        world_size, outcome_unless_odd, use_own_layers, ReducerDDP, options, alone, in_step
    )
    odd = world_size - 1
    if not alone:  # each rank has an error of its own
        for rank, ending in enumerate(endings[:odd]):
            assert ending.value.kind == "RuntimeError", ending
            assert f"'layers.{rank}.weight'" in ending.value.text, ending
        return
    assert endings[odd].exit_code == 1, endings
    for outcome in _outcomes(endings[:odd]):
        assert outcome.kind == "RankFailure", outcome
        assert f"rank {odd} (host " in outcome.text, outcome
        assert f"'layers.{odd}.weight'" in outcome.text, outcome
