"""Compares ddpx.replicate() with torch's DDP: gradients, weights and buffers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from parity_cases import CASES, compare_wrapper
from replicated import Replicated

from ddpx.testing.compare import summarize


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each case in one of its modes, in turn. With ``--full`` in all modes."""
    full = metafunc.config.getoption("--full")
    chosen = [
        (case.name, mode)
        for place, case in enumerate(CASES)
        for mode in (case.modes if full else [case.modes[place % len(case.modes)]])
    ]
    metafunc.parametrize(
        "case_name, mode", chosen, ids=["-".join(pair).replace(" ", "-") for pair in chosen]
    )


def _compare(case_name: str, mode: str) -> dict[str, Any]:
    return compare_wrapper(Replicated, case_name, mode)


def test_bits_match(ranks, case_name, mode):
    per_rank = ranks(2).run(_compare, case_name, mode)
    for caps in per_rank[0]:
        total = summarize([comparisons[caps] for comparisons in per_rank])
        assert total.num_tensors > 0
        assert total.identical, f"with {caps}:\n" + "\n".join(total.differences[:20])
