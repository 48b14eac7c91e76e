"""Compares ddpx.replicate() with torch's DDP, bit for bit."""

from __future__ import annotations

import pytest
from parity_cases import CASES, compare_wrapper
from replicated import Replicated

from ddpx.testing.compare import summarize

PAIRS = [(case.name, mode) for case in CASES for mode in case.modes]


def _compare(case_name: str, mode: str) -> dict[str, object]:
    return dict(compare_wrapper(Replicated, case_name, mode))


@pytest.mark.parametrize("case_name, mode", PAIRS)
def test_bits_match(ranks, case_name, mode):
    per_rank = ranks(2).run(_compare, case_name, mode)
    for caps in per_rank[0]:
        total = summarize([comparisons[caps] for comparisons in per_rank])
        assert total.num_tensors > 0
        assert total.identical, f"with {caps}:\n" + "\n".join(total.differences[:20])
