"""A rank comes late where hosts do not wait: the other ranks name it, with its last activity."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import stall_cases as cases
import torch
from device_ranks import DeviceRanks, NcclRanks

pytestmark = pytest.mark.timeout(120)
SIZE = 3
LATE = SIZE - 1
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    ],
    id=f"cuda-nccl-{SIZE}",
)
SEEN_IN = {
    "between steps": f"last seen in step {cases.STEP}, phase between steps for ",
    "forward": f"last seen in step {cases.STEP}, phase forward for ",
    "backward": f"last seen in step {cases.STEP}, phase backward",
    "own call": f"last seen in step {cases.STEP}, phase between steps for ",
    "stopped": ", stopped by a signal (SIGSTOP)",
    "device": f"; its device has computed step {cases.STEP} for ",
}


@pytest.fixture(params=["late", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ranks(device: str, late_library: None) -> Iterator[DeviceRanks]:
    """New ranks, since a failure ends their group."""
    made = DeviceRanks(device, NcclRanks(SIZE) if device == "cuda" else SIZE)
    yield made
    made.close()


@pytest.mark.parametrize("place", cases.PLACES)
def test_ranks_that_wait_name_the_late_rank(ranks, device, place):
    seen = ranks.run(cases.train, device, place)
    for rank, each in enumerate(seen):
        assert each.kind == "", (rank, each)
    for rank in range(LATE):
        texts = [text for text in seen[rank].warnings if f"missing: rank {LATE}, " in text]
        assert any(SEEN_IN[place] in text for text in texts), (rank, seen[rank])
        assert any(f"rank {LATE} is back after " in text for text in seen[rank].warnings), seen
        if device == "late":  # ranks that share a GPU take turns, and any may be late by 0.5 s
            others = f"missing: rank {1 - rank}"
            assert not any(others in text for text in seen[rank].warnings), seen


def test_a_backend_that_counts_no_calls(ranks, device):
    if device == "cuda":
        pytest.skip("the late device stands for nccl-lazy, which torch 2.15 has")
    seen = ranks.run(cases.train, device, "forward", "nccl-lazy")
    assert any(SEEN_IN["forward"] in text for text in seen[0].warnings), seen[0]


@pytest.mark.parametrize("place", ["forward", "stopped", "own call", "forward, no threads"])
def test_the_stall_error_names_the_late_rank(ranks, device, place):
    place, _, no_threads = place.partition(", ")
    if no_threads and device == "cuda":
        pytest.skip("torch starts a thread to abort a group of NCCL")
    options = {"error": True, "more_threads": not no_threads}
    seen = ranks.run(cases.train, device, place, **options, may_fail=True)
    for rank, each in enumerate(seen):
        assert each.kind == "RankStalled", (rank, each)
        assert f" rank {LATE} (host " in each.text, (rank, each)
        assert " has not come for " in each.text, (rank, each)
        if rank != LATE:
            assert each.seconds < cases.ERROR_S + 2, (rank, each)


def test_a_caught_error_is_no_failure_of_later_calls(ranks, device):
    assert ranks.run(cases.evaluate_after_an_error, device) == [3.0 * SIZE] * SIZE
